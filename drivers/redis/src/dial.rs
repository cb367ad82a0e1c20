//! Reaching a server: address, TLS, login, and what there is to know of it.

use std::io;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use taskonce_core::ErrorKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::address::Address;
use crate::fault::Refusal;
use crate::pipe::Wire;
use crate::place::{Login, Place};
use crate::primary::Reached;
use crate::server::Server;
use crate::url::{Settings, Tls};
use crate::wire::{Commands, Reply, parse};

/// The name that the server shows in `CLIENT LIST`.
const CLIENT_NAME: &[u8] = b"taskonce";
/// The longest greeting of a server that is read.
const GREETING_MAX: usize = 1 << 20;

/// How to reach a server.
#[derive(Clone)]
pub(crate) struct Dial {
    place: Arc<Place>,
    login: Option<Login>,
    sentinel_login: Option<Login>,
    database: i64,
    tls: Option<TlsConnector>,
    scripts: &'static [&'static str],
}

impl Dial {
    /// Checks what can be checked without a connection.
    pub(crate) fn new(settings: &Settings, scripts: &'static [&'static str]) -> Result<Dial, Refusal> {
        let tls = match &settings.tls {
            None => None,
            Some(tls) => {
                let (Place::Servers(hosts) | Place::Sentinel { sentinels: hosts, .. } | Place::Cluster(hosts)) =
                    &settings.place;
                for address in hosts {
                    certified_name(address)?;
                }
                Some(TlsConnector::from(Arc::new(tls_config(tls)?)))
            }
        };
        Ok(Dial {
            place: Arc::new(settings.place.clone()),
            login: settings.login.clone(),
            sentinel_login: settings.sentinel_login.clone(),
            database: settings.database,
            tls,
            scripts,
        })
    }

    /// A connection that is logged in, and its server.
    pub(crate) async fn connect(&self, address: &Address) -> Result<Reached, Refusal> {
        let mut wire = self.reach(address).await?;
        let server = self.greet(&mut wire).await?;
        Ok(Reached { address: address.clone(), wire, server, epoch: 0 })
    }

    /// A connection to a Sentinel that is logged in.
    pub(crate) async fn connect_to_sentinel(&self, address: &Address) -> Result<Box<dyn Wire>, Refusal> {
        let mut wire = self.reach(address).await?;
        let mut commands = Commands::default();
        authenticate(self.sentinel_login.as_ref(), &mut commands);
        match exchange(&mut wire, &commands).await?.first() {
            Some(Reply::Error(text)) => Err(Refusal::of_reply(text)),
            Some(_) | None => Ok(wire),
        }
    }

    async fn reach(&self, address: &Address) -> Result<Box<dyn Wire>, Refusal> {
        let stream =
            TcpStream::connect((address.host.as_str(), address.port)).await.map_err(|error| Refusal::of_io(&error))?;
        stream.set_nodelay(true).map_err(|error| Refusal::of_io(&error))?;
        Ok(match &self.tls {
            None => Box::new(stream),
            Some(connector) => {
                let name = certified_name(address)?;
                Box::new(connector.connect(name, stream).await.map_err(|error| Refusal::of_io(&error))?)
            }
        })
    }

    /// Logs in, asks who the server is, and leaves the scripts there: one round trip.
    async fn greet(&self, wire: &mut Box<dyn Wire>) -> Result<Server, Refusal> {
        let mut commands = Commands::default();
        authenticate(self.login.as_ref(), &mut commands);
        if self.database != 0 {
            commands.add(&[b"SELECT", self.database.to_string().as_bytes()]);
        }
        let must_succeed = commands.count;
        commands.add(&[b"HELLO"]).add(&[b"INFO", b"memory"]);
        // Conveniences: a user without the permission works as well.
        for body in self.scripts {
            commands.add(&[b"SCRIPT", b"LOAD", body.as_bytes()]);
        }
        commands.add(&[b"CLIENT", b"SETNAME", CLIENT_NAME]);
        let replies = exchange(wire, &commands).await?;
        let server = Server::read(&replies[must_succeed], &replies[must_succeed + 1]);
        if let Ok(server) = &server {
            // Before other errors: it may be why they are.
            server.belongs(&self.place)?;
        }
        for reply in &replies[..must_succeed] {
            if let Reply::Error(text) = reply {
                return Err(Refusal::of_reply(text));
            }
        }
        let mut server = server?;
        if server.memory.is_none() {
            let mut commands = Commands::default();
            commands.add(&[b"CONFIG", b"GET", b"maxmemory*"]);
            server.read_settings(&exchange(wire, &commands).await?[0]);
        }
        Ok(server)
    }
}

fn authenticate(login: Option<&Login>, commands: &mut Commands) {
    match login {
        None => {}
        Some(Login { user: None, password }) => {
            commands.add(&[b"AUTH", password.as_bytes()]);
        }
        Some(Login { user: Some(user), password }) => {
            commands.add(&[b"AUTH", user.as_bytes(), password.as_bytes()]);
        }
    }
}

/// The name that the server's certificate must have.
fn certified_name(address: &Address) -> Result<ServerName<'static>, Refusal> {
    ServerName::try_from(address.host.clone())
        .map_err(|_| Refusal::new(ErrorKind::BadUrl, "the host is no name that a certificate can have"))
}

/// Sends commands and waits for one reply to each.
pub async fn exchange(wire: &mut Box<dyn Wire>, commands: &Commands) -> Result<Vec<Reply>, Refusal> {
    let io = |error: io::Error| Refusal::of_io(&error);
    wire.write_all(&commands.bytes).await.map_err(io)?;
    wire.flush().await.map_err(io)?;
    let mut replies = Vec::with_capacity(commands.count);
    let mut unread = Vec::new();
    let mut taken = 0;
    while replies.len() < commands.count {
        match parse(&unread[taken..]).map_err(|_| Refusal::garbled())? {
            Some((reply, length)) => {
                taken += length;
                replies.push(reply);
            }
            None if unread.len() > GREETING_MAX => return Err(Refusal::garbled()),
            None => {
                if wire.read_buf(&mut unread).await.map_err(io)? == 0 {
                    // A server that is full says so, and closes.
                    return Err(match replies.first() {
                        Some(Reply::Error(text)) => Refusal::of_reply(text),
                        _ => Refusal::of_io(&io::ErrorKind::UnexpectedEof.into()),
                    });
                }
            }
        }
    }
    if taken < unread.len() { Err(Refusal::out_of_step()) } else { Ok(replies) }
}

fn tls_config(tls: &Tls) -> Result<ClientConfig, Refusal> {
    let bad = |what: &str| Refusal::new(ErrorKind::BadUrl, format!("`ca` holds a certificate that {what}"));
    let mut roots = RootCertStore::empty();
    match tls {
        Tls::Public => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Tls::Private(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem) {
                let certificate = certificate.map_err(|_| bad("cannot be read"))?;
                roots.add(certificate).map_err(|_| bad("cannot be trusted"))?;
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Refusal::new(ErrorKind::Unsupported, format!("no TLS here: {error}")))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}
