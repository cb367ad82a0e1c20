//! The servers' health, for people: whether they answer, and what endangers what they keep. What to make of a server's
//! answers is in `health`.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use taskonce_core::store::{Finding, Level};
use tokio::time::Instant;

use crate::address::Address;
use crate::connection::{At, Batch, Links};
use crate::fault::Refusal;
use crate::health::{self, finding};
use crate::node::Target;
use crate::place::Place;
use crate::server::Server;
use crate::wire::{Commands, Reply};

/// How many round trips are timed.
const TRIPS: usize = 5;
/// How many primaries of a Cluster are looked at.
const PRIMARIES_MAX: usize = 256;
/// What stands behind the prefix in the key that is written to see whether one can be: no task's key is without a `/`.
const PROBE: &[u8] = b"doctor";
/// How long it lives if it cannot be removed.
const PROBE_LIFE_MS: &[u8] = b"1000";
/// Whom a server takes a connection for that names no user.
const DEFAULT_USER: &str = "default";

/// What the store or the queue looks at by itself.
#[async_trait]
pub trait Further: Sync {
    /// What it makes of a server, behind its version.
    fn version(&self, server: &Server) -> String;

    /// Looks at one of the primaries.
    async fn look_at(&self, links: &Arc<Links>, server: &Target) -> Option<Finding>;

    /// Looks at what is kept.
    async fn look(&self, links: &Arc<Links>) -> Vec<Finding>;
}

/// Everything that can be found out, the worst first.
pub async fn findings(links: &Arc<Links>, further: &dyn Further) -> Vec<Finding> {
    // As it is now: by new connections, whose greetings ask for the settings again.
    links.renew();
    let mut findings = match look(links, further).await {
        Ok(findings) => findings,
        Err(refusal) => vec![unreachable(links, refusal)],
    };
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

fn unreachable(links: &Links, refusal: Refusal) -> Finding {
    let error = links.error(refusal);
    finding(Level::Fault, "reachability", error.to_string(), error.hint())
}

async fn look(links: &Arc<Links>, further: &dyn Further) -> Result<Vec<Finding>, Refusal> {
    let primaries = links.primaries(links.deadline()).await?;
    let mut servers = Vec::new();
    for number in 0..primaries.min(PRIMARIES_MAX) {
        match look_at(links, number, further).await {
            Ok(found) => servers.push(found),
            // Of several, the others are looked at as well.
            Err(refusal) if primaries > 1 => servers.push((String::new(), vec![unreachable(links, refusal)])),
            Err(refusal) => return Err(refusal),
        }
    }
    let mut findings = merge(servers);
    findings.push(writing(links).await);
    findings.push(failover(links, primaries).await?);
    findings.extend(further.look(links).await);
    if primaries > PRIMARIES_MAX {
        let text = format!("{primaries} primaries, of which {PRIMARIES_MAX} were looked at");
        findings.push(finding(Level::Warning, "servers", text, "ask the others with another tool"));
    }
    Ok(findings)
}

/// What several servers agree in is told once, the rest with the name of the server.
fn merge(servers: Vec<(String, Vec<Finding>)>) -> Vec<Finding> {
    if let [_] = servers.as_slice() {
        return servers.into_iter().flat_map(|(_, findings)| findings).collect();
    }
    let count = servers.len();
    let all: Vec<(String, Finding)> = servers
        .into_iter()
        .flat_map(|(server, findings)| findings.into_iter().map(move |finding| (server.clone(), finding)))
        .collect();
    let mut merged: Vec<Finding> = Vec::new();
    for (server, found) in &all {
        if all.iter().filter(|(_, other)| other == found).count() == count {
            if !merged.contains(found) {
                merged.push(found.clone());
            }
        } else if server.is_empty() {
            merged.push(found.clone());
        } else {
            merged.push(Finding { text: format!("{server}: {}", found.text), ..found.clone() });
        }
    }
    merged
}

/// One of the primaries: its name, and what is found there.
async fn look_at(links: &Arc<Links>, number: usize, further: &dyn Further) -> Result<(String, Vec<Finding>), Refusal> {
    let (address, server) = server(links, number).await?;
    let settings = &links.settings;
    let mut findings = vec![health::round_trip(round_trip(links, number).await?)];
    findings.push(finding(Level::Fine, "version", format!("{}{}", server.name, further.version(&server)), ""));
    findings.push(if server.is_replica {
        let hint = match &settings.place {
            Place::Servers(hosts) if hosts.len() == 1 => "point the URL at the primary",
            Place::Servers(_) | Place::Sentinel { .. } | Place::Cluster(_) => "a switch is under way; look again",
        };
        finding(Level::Fault, "role", "a replica, which refuses writes", hint)
    } else {
        finding(Level::Fine, "role", "primary", "")
    });
    findings.push(health::eviction(server.memory.as_ref(), settings.eviction));
    findings.extend(server.memory.as_ref().and_then(health::room));
    let user = settings.login.as_ref().and_then(|login| login.user.as_deref()).unwrap_or(DEFAULT_USER);
    let answers = ask(
        links,
        number,
        &[
            &["INFO", "persistence"],
            &["CONFIG", "GET", "appendfsync"],
            &["CONFIG", "GET", "save"],
            &["TIME"],
            &["INFO", "replication"],
            &["ACL", "DRYRUN", user, "FLUSHALL"],
            &["ACL", "DRYRUN", user, "FLUSHDB"],
        ],
    )
    .await?;
    if let [info, fsync, save, time, replication, flush @ ..] = answers.as_slice() {
        findings.push(health::persistence(info, setting(fsync), setting(save)));
        findings.extend(health::clock(time));
        let fails_over = !matches!(&settings.place, Place::Servers(hosts) if hosts.len() == 1);
        findings.extend(health::replication(replication, settings.wait_replicas, fails_over));
        findings.push(health::flush(flush));
    }
    let name = address.to_string();
    findings.extend(further.look_at(links, &Target::Server(address)).await);
    Ok((name, findings))
}

/// Whether this user may write a record, and the server takes it: a key that is no task's, which goes at once.
async fn writing(links: &Arc<Links>) -> Finding {
    let subject = "writing";
    let key = [links.settings.prefix.as_bytes(), PROBE].concat();
    let mut probe = Commands::default();
    probe.add(&[b"SET", &key, b"", b"PX", PROBE_LIFE_MS]);
    probe.add(&[b"DEL", &key]);
    let written = links.ask(At::Key(&key), links.deadline(), |_| Ok(Batch(&probe))).await;
    let refusal = match written {
        Ok(replies) => match replies.first() {
            Some(Reply::Error(text)) => Refusal::of_reply(text),
            Some(Reply::Status(_) | Reply::Int(_) | Reply::Bulk(_) | Reply::List(_) | Reply::Nil) | None => {
                return finding(Level::Fine, subject, "a key below the prefix was written and removed", "");
            }
        },
        Err(refusal) => refusal,
    };
    let error = refusal.about("a key below the prefix");
    finding(Level::Fault, subject, error.to_string(), error.hint())
}

/// Who takes a primary's place, and how.
async fn failover(links: &Arc<Links>, primaries: usize) -> Result<Finding, Refusal> {
    let subject = "failover";
    Ok(match &links.settings.place {
        Place::Servers(hosts) if hosts.len() == 1 => finding(
            Level::Fine,
            subject,
            "none from here: the URL names one server, and calls fail while it is away",
            "",
        ),
        Place::Servers(hosts) => {
            let text = format!("by hand: the one of {} servers that says it is the primary is used", hosts.len());
            finding(Level::Fine, subject, text, "")
        }
        Place::Sentinel { sentinels, service } => {
            let text = format!("by Sentinel, which {} in the URL are asked for `{service}`", sentinels.len());
            finding(Level::Fine, subject, text, "")
        }
        Place::Cluster(_) => {
            let answers =
                ask(links, 0, &[&["CLUSTER", "INFO"], &["CONFIG", "GET", "cluster-require-full-coverage"]]).await?;
            match answers.as_slice() {
                [info, coverage] => health::cluster(info, setting(coverage)),
                _ => finding(Level::Warning, subject, format!("{primaries} primaries, whose state is unknown"), ""),
            }
        }
    })
}

/// A primary, by the connection that answers.
async fn server(links: &Arc<Links>, number: usize) -> Result<(Address, Server), Refusal> {
    let seen = Mutex::new(None);
    let ping = commands(&[&["PING"]]);
    links
        .ask(At::Primary(number), links.deadline(), |link| {
            *seen.lock().unwrap_or_else(PoisonError::into_inner) = Some((link.address.clone(), link.server.clone()));
            Ok(Batch(&ping))
        })
        .await?;
    seen.into_inner().unwrap_or_else(PoisonError::into_inner).ok_or_else(|| Refusal::misshapen("PING"))
}

async fn ask(links: &Arc<Links>, number: usize, words: &[&[&str]]) -> Result<Vec<Reply>, Refusal> {
    let commands = commands(words);
    links.ask(At::Primary(number), links.deadline(), |_| Ok(Batch(&commands))).await
}

fn commands(all: &[&[&str]]) -> Commands {
    let mut commands = Commands::default();
    for words in all {
        let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
        commands.add(&words);
    }
    commands
}

/// The median of a few round trips.
async fn round_trip(links: &Arc<Links>, number: usize) -> Result<Duration, Refusal> {
    let mut trips = [Duration::ZERO; TRIPS];
    for trip in &mut trips {
        let start = Instant::now();
        ask(links, number, &[&["PING"]]).await?;
        *trip = start.elapsed();
    }
    trips.sort_unstable();
    Ok(trips[TRIPS / 2])
}

fn setting(answer: &Reply) -> Option<&str> {
    match answer {
        Reply::List(pair) => pair.get(1).and_then(Reply::text),
        Reply::Status(_) | Reply::Error(_) | Reply::Int(_) | Reply::Bulk(_) | Reply::Nil => None,
    }
}
