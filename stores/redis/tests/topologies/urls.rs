//! URLs that say something else than what is there: an error of its own for each, that says how to write it.

use taskonce_core::{Error, ErrorKind};
use taskonce_testkit::sentinel::SentinelOptions;
use taskonce_testkit::{RedisCluster, RedisServer, Sentinels};

use crate::support::{claim_error, key, open, running, store};

async fn error_of(url: &str) -> Error {
    claim_error(&open(url), "a").await
}

fn assert_says(error: &Error, kind: ErrorKind, what: &str, hint: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.to_string().contains(what), "{error}");
    assert!(error.hint().contains(hint), "{error:?}");
}

#[tokio::test]
async fn a_url_of_another_topology_is_refused_with_the_right_one() {
    let server = RedisServer::start(&[]).unwrap();
    let at = format!("127.0.0.1:{}", server.port());
    let error = error_of(&format!("redis+cluster://{at}")).await;
    assert_says(&error, ErrorKind::BadUrl, "is not a node of a Cluster", "redis://host");
    let error = error_of(&format!("redis+sentinel://{at}/tasks")).await;
    assert_says(&error, ErrorKind::BadUrl, "this is no Sentinel", "26379");

    let cluster = RedisCluster::start(1, 0, &[]).unwrap();
    let at = format!("127.0.0.1:{}", cluster.ports()[0]);
    for url in [format!("redis://{at}"), format!("redis://{at}/3")] {
        assert_says(&error_of(&url).await, ErrorKind::BadUrl, "is a node of a Cluster", "redis+cluster:");
    }
    // The other may come back, and be the right one.
    let error = error_of(&format!("redis://{at},127.0.0.1:1")).await;
    assert_says(&error, ErrorKind::Unreachable, "is a node of a Cluster", "redis+cluster:");
    assert_says(&error_of(&format!("redis+sentinel://{at}/s")).await, ErrorKind::BadUrl, "this is no Sentinel", "");

    let stand = Sentinels::start(&SentinelOptions::default()).unwrap();
    let at = format!("127.0.0.1:{}", stand.sentinel(0).port());
    for url in [format!("redis://{at}"), format!("redis://{at}/3"), format!("redis+cluster://{at}")] {
        assert_says(&error_of(&url).await, ErrorKind::BadUrl, "a Sentinel listens there", "redis+sentinel://");
    }
    let error = error_of(&stand.url().replace("/tasks", "/taks")).await;
    assert_says(&error, ErrorKind::BadUrl, "no service `taks`", "SENTINEL MASTERS");
}

#[tokio::test]
async fn passwords_of_servers_and_of_sentinels_are_kept_apart() {
    let options = SentinelOptions {
        args: ["--requirepass", "forservers"].map(str::to_owned).to_vec(),
        sentinel_password: Some("forsentinels".into()),
        ..SentinelOptions::default()
    };
    let stand = Sentinels::start(&options).unwrap();
    let url = stand.url();
    store(&open(&url), &key("a"), None, &running()).await;
    let error = error_of(&url.replace("forsentinels", "hunter2")).await;
    assert_says(&error, ErrorKind::Denied, "Sentinel", "sentinel_password");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
    let error = error_of(url.split('?').next().unwrap()).await;
    assert_says(&error, ErrorKind::Denied, "Sentinel", "sentinel_password");
    let error = error_of(&url.replace("forservers", "hunter2")).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
}

#[tokio::test]
async fn a_cluster_with_a_password_takes_it_and_refuses_another() {
    let cluster = RedisCluster::start(3, 0, &["--requirepass", "right"]).unwrap();
    for i in 0..20 {
        store(&open(&cluster.url()), &key(&format!("a-{i}")), None, &running()).await;
    }
    let error = error_of(&cluster.url().replace("right", "hunter2")).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
}
