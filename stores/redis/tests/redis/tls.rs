//! TLS: a private authority, a wrong one, and no TLS where it is wanted.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use taskonce_core::ErrorKind;
use taskonce_testkit::sentinel::SentinelOptions;
use taskonce_testkit::{Program, RedisCluster, RedisServer, Sentinels};
use tempfile::TempDir;

use crate::support::{claim_error, done, key, open, running, store};

/// A folder with `ca.pem`, and `cert.pem` and `key.pem` of a server at 127.0.0.1.
fn certificates() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // Servers among themselves take a certificate that is issued by its own name for one that signs itself.
    authority.distinguished_name.push(DnType::CommonName, "authority of a test");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let server = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap().signed_by(&key, &authority).unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let ca = write("ca.pem", authority.pem());
    write("cert.pem", server.pem());
    write("key.pem", key.serialize_pem());
    (folder, ca)
}

/// Arguments that name them to a server.
fn files(folder: &TempDir) -> Vec<String> {
    let names = [("cert-file", "cert.pem"), ("key-file", "key.pem"), ("ca-cert-file", "ca.pem")];
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let named = names.iter().flat_map(|(what, name)| [format!("--tls-{what}"), path(name)]);
    ["--tls-auth-clients".to_owned(), "no".to_owned()].into_iter().chain(named).collect()
}

#[tokio::test]
async fn tls_works_with_a_private_authority_and_with_no_other() {
    let (folder, ca) = certificates();
    let listening = ["--port", "0", "--tls-port", "{port}", "--requirepass", "secret"].map(str::to_owned);
    let args = [&listening[..], &files(&folder)].concat();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let server = RedisServer::start_program(Program::RedisWithTls, &args).unwrap();
    let redis = open(&format!("{}?ca={}", server.url(), ca.display()));
    let (claim, mut last) = (running(), done());
    last.output = taskonce_core::record::Output::kept("text/plain", vec![7; 1 << 20]);
    store(&redis, &key("a"), None, &claim).await;
    store(&redis, &key("a"), Some(&claim), &last).await;
    assert_eq!(*crate::support::load(&redis, &key("a")).await.record, last);

    let stranger = claim_error(&open(&server.url()), "a").await;
    assert_eq!(stranger.kind(), ErrorKind::Unreachable, "{stranger:?}");
    assert!(stranger.to_string().contains("certificate") && stranger.hint().contains("ca"), "{stranger:?}");
    let (_other, other_ca) = certificates();
    let wrong = claim_error(&open(&format!("{}?ca={}", server.url(), other_ca.display())), "a").await;
    assert!(wrong.to_string().contains("certificate"), "{wrong:?}");
    let plain = claim_error(&open(&server.url().replace("rediss:", "redis:")), "a").await;
    assert!(matches!(plain.kind(), ErrorKind::Unreachable | ErrorKind::Protocol), "{plain:?}");
}

#[tokio::test]
async fn tls_works_with_a_cluster_and_behind_sentinels() {
    let (folder, ca) = certificates();
    let with = |more: [&str; 4]| [more.map(str::to_owned).to_vec(), files(&folder)].concat();
    let args = with(["--tls-cluster", "yes", "--requirepass", "secret"]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let cluster = RedisCluster::start_program(Program::RedisWithTls, 3, 0, &args).unwrap();
    assert!(cluster.url().starts_with("rediss+cluster://:secret@"));
    let sentinels = Sentinels::start(&SentinelOptions {
        args: with(["--tls-replication", "yes", "--requirepass", "secret"]),
        sentinel_password: Some("watcher".to_owned()),
        program: Program::RedisWithTls,
        ..SentinelOptions::default()
    })
    .unwrap();
    assert!(sentinels.url().starts_with("rediss+sentinel://:secret@"));
    for url in [cluster.url(), sentinels.url()] {
        let mark = if url.contains('?') { '&' } else { '?' };
        let redis = open(&format!("{url}{mark}timeout=20s&ca={}", ca.display()));
        for number in 0..20 {
            let (key, claim, last) = (key(&format!("t-{number}")), running(), done());
            store(&redis, &key, None, &claim).await;
            store(&redis, &key, Some(&claim), &last).await;
            assert_eq!(*crate::support::load(&redis, &key).await.record, last);
        }
        let start = Instant::now();
        let stranger = claim_error(&open(&format!("{url}{mark}timeout=30s")), "a").await;
        assert_eq!(stranger.kind(), ErrorKind::Unreachable, "{stranger:?}");
        assert!(stranger.to_string().contains("certificate") && stranger.hint().contains("ca"), "{stranger:?}");
        assert!(start.elapsed() < Duration::from_secs(15), "told after {:?}", start.elapsed());
    }
}

#[tokio::test]
async fn a_server_without_tls_is_not_taken_for_one_with_it() {
    let server = RedisServer::start(&[]).unwrap();
    let error = claim_error(&open(&server.url().replace("redis:", "rediss:")), "a").await;
    assert!(matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::TimedOut), "{error:?}");
}
