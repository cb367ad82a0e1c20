//! TLS: each mode against servers with, without and with the wrong certificate.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use taskonce_core::ErrorKind;
use taskonce_postgres::{PostgresStore, migrate};
use taskonce_testkit::PostgresServer;

use crate::support::{claim, claim_error, key, running};

/// An authority, and what it signed for a server of this name.
fn certificates(name: &str) -> (String, String, String) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "authority of a test");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut server = CertificateParams::new(vec![name.into()]).unwrap();
    server.distinguished_name.push(DnType::CommonName, "ada");
    let server = server.signed_by(&key, &authority).unwrap();
    (authority.pem(), server.pem(), key.serialize_pem())
}

/// A server with a certificate for this name, which takes some users only with TLS, and one only with a certificate.
fn server(name: &str) -> (PostgresServer, String) {
    let (authority, certificate, private) = certificates(name);
    let hba = "local all all trust\nhost all postgres 127.0.0.1/32 trust\n\
               hostssl all ada 127.0.0.1/32 cert\nhostssl all secure 127.0.0.1/32 trust\n";
    let mut server = PostgresServer::prepare(&[
        "-c",
        "fsync=off",
        "-c",
        "ssl=on",
        "-c",
        "ssl_cert_file={dir}/cert.pem",
        "-c",
        "ssl_key_file={dir}/key.pem",
        "-c",
        "ssl_ca_file={dir}/ca.pem",
    ])
    .unwrap();
    server.initialise().unwrap();
    server.put("data/pg_hba.conf", hba.as_bytes()).unwrap();
    server.put("cert.pem", certificate.as_bytes()).unwrap();
    server.put("key.pem", private.as_bytes()).unwrap();
    let ca = server.put("ca.pem", authority.as_bytes()).unwrap().to_str().unwrap().to_owned();
    let server = server.start_prepared().unwrap();
    server.psql("postgres", "create role ada superuser login; create role secure superuser login").unwrap();
    (server, ca)
}

async fn works(url: &str, id: &str) {
    claim(&PostgresStore::from_url(url).unwrap(), &key(id), &running(1)).await;
}

async fn refused(url: &str) -> taskonce_core::Error {
    claim_error(&PostgresStore::from_url(url).unwrap(), "refused").await
}

#[tokio::test]
async fn each_mode_checks_what_its_name_says() {
    let (server, ca) = server("127.0.0.1");
    let (_, stranger, _) = certificates("127.0.0.1");
    let other = server.put("other.pem", stranger.as_bytes()).unwrap().to_str().unwrap().to_owned();
    let url = |options: &str| format!("postgres://secure@127.0.0.1:{}/postgres?timeout=20s&{options}", server.port());
    migrate(&url("sslmode=require")).await.unwrap();
    works(&url(""), "prefer").await;
    works(&url("sslmode=require"), "require").await;
    works(&url(&format!("sslmode=require&sslrootcert={ca}")), "require-ca").await;
    works(&url(&format!("sslmode=verify-ca&sslrootcert={ca}")), "verify-ca").await;
    works(&url(&format!("sslmode=verify-full&sslrootcert={ca}")), "verify-full").await;
    let plain = refused(&url("sslmode=disable")).await;
    assert_eq!(plain.kind(), ErrorKind::Denied, "{plain:?}");
    assert!(plain.to_string().contains("without TLS") && plain.hint().contains("sslmode=require"), "{plain:?}");
    for options in [
        "sslmode=verify-full".to_owned(),
        format!("sslmode=verify-ca&sslrootcert={other}"),
        format!("sslmode=require&sslrootcert={other}"),
    ] {
        let error = refused(&url(&options)).await;
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{options}: {error:?}");
        assert!(
            error.to_string().contains("certificate") && error.hint().contains("sslrootcert"),
            "{options}: {error:?}"
        );
    }
}

#[tokio::test]
async fn a_name_is_checked_by_verify_full_alone() {
    let (server, ca) = server("another.example");
    let url = |mode: &str| {
        format!("postgres://secure@127.0.0.1:{}/postgres?timeout=20s&sslmode={mode}&sslrootcert={ca}", server.port())
    };
    migrate(&url("verify-ca")).await.unwrap();
    works(&url("verify-ca"), "a").await;
    let error = refused(&url("verify-full")).await;
    assert!(error.kind() == ErrorKind::Unreachable && error.to_string().contains("certificate"), "{error:?}");
}

#[tokio::test]
async fn a_client_shows_its_own_certificate() {
    let (server, ca) = server("127.0.0.1");
    let folder = server.folder().display();
    let url = |more: &str| {
        format!(
            "postgres://ada@127.0.0.1:{}/postgres?timeout=20s&sslmode=verify-full&sslrootcert={ca}{more}",
            server.port()
        )
    };
    let own = format!("&sslcert={folder}/cert.pem&sslkey={folder}/key.pem");
    migrate(&url(&own)).await.unwrap();
    works(&url(&own), "a").await;
    let error = refused(&url("")).await;
    assert!(matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unreachable), "{error:?}");
}

#[tokio::test]
async fn a_server_without_tls_is_not_taken_for_one_with_it() {
    let server = PostgresServer::start(&["-c", "fsync=off"]).unwrap();
    let error = refused(&format!("{}?sslmode=require", server.url("postgres"))).await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(error.to_string().contains("TLS") && error.hint().contains("ssl = on"), "{error:?}");
    let socket = format!(
        "postgres://postgres@%2F{}:{}/postgres",
        &server.folder().to_str().unwrap()[1..].replace('/', "%2F"),
        server.port()
    );
    migrate(&socket).await.unwrap();
    works(&socket, "over a socket").await;
}
