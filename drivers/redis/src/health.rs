//! What the settings and counters of one server say of the records that it keeps. No I/O here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use taskonce_core::store::{Finding, Level};

use crate::server::{Memory, field};
use crate::url::Eviction;
use crate::wire::Reply;

/// A round trip that is slower than this makes every claim slow.
const TRIP_SLOW: Duration = Duration::from_millis(20);
/// A difference between the clocks that people should know of.
const CLOCKS_APART: Duration = Duration::from_secs(5);
/// Which part of the memory may be used before it is worth a warning.
const MEMORY_WARNING: f64 = 0.9;
/// A replica that was silent for longer than this, in seconds, does not keep up: they report each second.
const LAG_WARNING: u64 = 5;

/// Advice where the user may not ask.
const ALLOW_INFO: &str = "allow the user `info`";

/// A finding.
pub fn finding(level: Level, subject: &str, text: impl Into<String>, hint: &str) -> Finding {
    Finding { level, subject: subject.into(), text: text.into(), hint: hint.into() }
}

pub(crate) fn round_trip(trip: Duration) -> Finding {
    let millis = trip.as_secs_f64() * 1000.0;
    if trip <= TRIP_SLOW {
        finding(Level::Fine, "round trip", format!("{millis:.2} ms"), "")
    } else {
        finding(Level::Warning, "round trip", format!("{millis:.1} ms"), "run workers closer to the server")
    }
}

pub(crate) fn eviction(memory: Option<&Memory>, setting: Eviction) -> Finding {
    let subject = "eviction policy";
    match memory {
        None => finding(
            Level::Warning,
            subject,
            "this user may not read it",
            "allow the user `info`, or make sure yourself that `maxmemory-policy` is `noeviction`",
        ),
        Some(memory) if memory.evicts() => {
            let text = format!("{} at {} bytes: tasks are forgotten when memory is full", memory.policy, memory.limit);
            let level = match setting {
                Eviction::Refuse => Level::Fault,
                Eviction::Accept => Level::Warning,
            };
            finding(level, subject, text, "set `maxmemory-policy noeviction`")
        }
        Some(memory) if memory.policy != "noeviction" => {
            finding(Level::Fine, subject, format!("{}, without effect as there is no `maxmemory`", memory.policy), "")
        }
        Some(memory) => finding(Level::Fine, subject, memory.policy.clone(), ""),
    }
}

pub(crate) fn room(memory: &Memory) -> Option<Finding> {
    if memory.used == 0 {
        return None;
    }
    if memory.limit == 0 {
        return Some(finding(Level::Fine, "memory", format!("{} bytes in use, no `maxmemory`", memory.used), ""));
    }
    let share = memory.used as f64 / memory.limit as f64;
    let text = format!("{:.0} % of {} bytes in use", share * 100.0, memory.limit);
    Some(if share < MEMORY_WARNING {
        finding(Level::Fine, "memory", text, "")
    } else {
        finding(
            Level::Warning,
            "memory",
            text,
            "raise `maxmemory` or shorten retention: new claims are refused when it is full",
        )
    })
}

/// From `INFO persistence` and the settings `appendfsync` and `save`.
pub(crate) fn persistence(info: &Reply, fsync: Option<&str>, save: Option<&str>) -> Finding {
    let subject = "persistence";
    let Some(info) = info.text() else {
        return finding(
            Level::Warning,
            subject,
            "this user may not read it",
            "allow the user `info`, or make sure yourself that the server writes to disk",
        );
    };
    let appends = field(info, "aof_enabled") == Some("1");
    let failing =
        field(info, "aof_last_write_status") == Some("err") || field(info, "rdb_last_bgsave_status") == Some("err");
    let always =
        "for less loss set `appendonly yes` and `appendfsync always`, or use a store that keeps what it acknowledged";
    match (appends, fsync, save) {
        _ if failing => {
            finding(Level::Fault, subject, "the server fails to write to its disk", "look at the server's log")
        }
        (true, Some("always"), _) => {
            finding(Level::Fine, subject, "each write is on disk before it is acknowledged", "")
        }
        (true, Some("everysec"), _) => finding(
            Level::Warning,
            subject,
            "appended to a file each second: a crash forgets up to two seconds",
            always,
        ),
        (true, None, _) => finding(
            Level::Warning,
            subject,
            "appended to a file, how often this user may not read (`appendfsync`): a crash forgets what was not written",
            always,
        ),
        (true, Some(_), _) => finding(
            Level::Warning,
            subject,
            "appended to a file, at times that the system chooses: a crash forgets what was not written",
            always,
        ),
        (false, _, Some("")) => finding(Level::Warning, subject, "none: a restart forgets every task", always),
        (false, _, _) => {
            finding(Level::Warning, subject, "snapshots only: a crash forgets what came after the last one", always)
        }
    }
}

/// What follows a primary, by its `INFO replication`.
struct Replicas {
    online: u32,
    /// How many bytes the one that is furthest behind has not acknowledged.
    behind: u64,
    /// How many seconds ago the most silent one reported.
    silent: u64,
}

impl Replicas {
    fn read(info: &str) -> Replicas {
        let end = field(info, "master_repl_offset").and_then(|offset| offset.parse().ok()).unwrap_or(0u64);
        let mut replicas = Replicas { online: 0, behind: 0, silent: 0 };
        let count = field(info, "connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0u32);
        for number in 0..count {
            let Some(line) = field(info, &format!("slave{number}")) else { continue };
            let part = |name: &str| line.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            let number = |name| part(name).and_then(|value| value.parse::<u64>().ok());
            if part("state") != Some("online") {
                continue;
            }
            replicas.online += 1;
            replicas.behind = replicas.behind.max(end.saturating_sub(number("offset").unwrap_or(0)));
            replicas.silent = replicas.silent.max(number("lag").unwrap_or(0));
        }
        replicas
    }
}

/// From `INFO replication`: whether replicas follow, how far behind they are, and what a failover to them forgets.
///
/// `wanted` replicas must have a write before it counts. `expected` says that the topology is made to fail over.
pub(crate) fn replication(info: &Reply, wanted: u32, expected: bool) -> Vec<Finding> {
    let subject = "replication";
    let Some(info) = info.text() else {
        let level = if wanted > 0 || expected { Level::Warning } else { Level::Fine };
        return vec![finding(
            level,
            subject,
            "this user may not read it",
            if level == Level::Fine { "" } else { ALLOW_INFO },
        )];
    };
    let Replicas { online, behind, silent } = Replicas::read(info);
    let who = match online {
        1 => "1 replica follows".to_owned(),
        online => format!("{online} replicas follow"),
    };
    let late = format!("{who}; one was last heard of {silent} s ago and is {behind} bytes behind");
    let main = if online < wanted {
        finding(
            Level::Fault,
            subject,
            format!(
                "{who}, and `wait_replicas={wanted}` lets no write count without {wanted}: no claim begins, no heartbeat \
                 renews, and after a lease all claims are lost"
            ),
            "repair the replicas within a lease, or ask for fewer in `wait_replicas`",
        )
    } else if online == 0 && expected {
        finding(
            Level::Warning,
            subject,
            "no replica follows: if this server dies, its tasks are away until it is back",
            "give every primary a replica",
        )
    } else if online == 0 {
        finding(Level::Fine, subject, "no replica follows: what this server loses is lost", "")
    } else if silent > LAG_WARNING {
        finding(Level::Warning, subject, late, "look at the replicas' logs and at the network between them")
    } else if wanted == 0 {
        finding(
            Level::Warning,
            subject,
            format!(
                "{who}, {behind} bytes behind; a failover forgets what was acknowledged and had not reached the new primary"
            ),
            "with `wait_replicas=1` in the URL a write counts only when a replica has it",
        )
    } else {
        let text = format!("{who}, {behind} bytes behind; a write counts when {wanted} of {online} have it");
        finding(Level::Fine, subject, text, "")
    };
    // The number of good replicas is told only where a minimum is set.
    let split = (online > 0 || expected).then(|| match field(info, "min_slaves_good_slaves") {
        Some(good) => finding(
            Level::Fine,
            "split brain",
            format!("a primary without its replicas refuses writes (`min-replicas-to-write`); {good} are good now"),
            "",
        ),
        None => finding(
            Level::Warning,
            "split brain",
            "a primary that is cut off from its replicas goes on to acknowledge writes, which a failover forgets",
            "set `min-replicas-to-write 1` and `min-replicas-max-lag 10`",
        ),
    });
    [Some(main), split].into_iter().flatten().collect()
}

/// From `ACL DRYRUN user` for `FLUSHALL` and `FLUSHDB`.
pub(crate) fn flush(answers: &[Reply]) -> Finding {
    let subject = "flush";
    let may = |answer: &Reply| match answer {
        Reply::Status(_) => Some(true),
        Reply::Bulk(_) => Some(false),
        // Before 7.0 there is no such question, and this user may not ask it.
        Reply::Error(_) | Reply::Int(_) | Reply::Nil | Reply::List(_) => None,
    };
    let answers: Vec<_> = answers.iter().map(may).collect();
    if answers.contains(&Some(true)) {
        finding(
            Level::Warning,
            subject,
            "this user may run FLUSHALL or FLUSHDB, which forgets every task",
            "give the store a user of its own that may not: `docs/redis` has the line",
        )
    } else if answers.contains(&None) {
        finding(
            Level::Fine,
            subject,
            "it cannot be asked here whether this user may run FLUSHALL; see `ACL GETUSER`",
            "",
        )
    } else {
        finding(Level::Fine, subject, "this user may run neither FLUSHALL nor FLUSHDB", "")
    }
}

/// From `CLUSTER INFO` and the setting `cluster-require-full-coverage`.
pub(crate) fn cluster(info: &Reply, coverage: Option<&str>) -> Finding {
    let subject = "cluster";
    let Some(info) = info.text() else {
        return finding(Level::Warning, subject, "this user may not read its state", "allow the user `cluster|info`");
    };
    let number = |name| field(info, name).and_then(|value| value.parse::<u32>().ok()).unwrap_or(0);
    let (served, suspected, failed) =
        (number("cluster_slots_ok"), number("cluster_slots_pfail"), number("cluster_slots_fail"));
    let all = u32::try_from(crate::slots::SLOTS).unwrap_or(u32::MAX);
    let whole = match coverage {
        Some("no") => "; a slot without a server leaves the others at work (`cluster-require-full-coverage no`)",
        Some(_) => "; one slot without a server stops them all (`cluster-require-full-coverage yes`)",
        None => "",
    };
    let text = format!(
        "{served} of {all} slots are served by {} primaries, {} nodes are known{whole}",
        number("cluster_size"),
        number("cluster_known_nodes")
    );
    let state = field(info, "cluster_state");
    if state != Some("ok") || failed > 0 || served < all && suspected == 0 {
        let text = format!("it says `{}`: {failed} slots have lost their server; {text}", state.unwrap_or("nothing"));
        finding(Level::Fault, subject, text, "bring the missing nodes back, or fail over to their replicas")
    } else if suspected > 0 {
        let text = format!("{suspected} slots belong to a node that does not answer its neighbours; {text}");
        finding(Level::Warning, subject, text, "look at the node that does not answer")
    } else {
        finding(Level::Fine, subject, text, "")
    }
}

/// From `TIME`.
pub(crate) fn clock(time: &Reply) -> Option<Finding> {
    let Reply::List(parts) = time else { return None };
    let number = |part: &Reply| part.text().and_then(|text| text.parse::<u64>().ok());
    let theirs = Duration::from_secs(number(parts.first()?)?) + Duration::from_micros(number(parts.get(1)?)?);
    let ours = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let apart = theirs.abs_diff(ours);
    let text = format!("{:.3} s apart from this machine's; no rule depends on it", apart.as_secs_f64());
    Some(if apart < CLOCKS_APART {
        finding(Level::Fine, "clock", text, "")
    } else {
        finding(
            Level::Warning,
            "clock",
            text,
            "keep both clocks in step: a jump of the server's frees claims early or late",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Reply {
        Reply::Bulk(text.replace('\n', "\r\n").into_bytes())
    }

    #[test]
    fn a_replica_that_is_behind_or_silent_is_told() {
        let info = |lag: u64| {
            bulk(&format!(
                "role:master\nconnected_slaves:2\n\
                 slave0:ip=127.0.0.1,port=1,state=online,offset=900,lag={lag}\n\
                 slave1:ip=127.0.0.1,port=2,state=wait_bgsave,offset=0,lag=0\nmaster_repl_offset:1000\n"
            ))
        };
        let [main, split] = &replication(&info(1), 0, false)[..] else { panic!("two findings") };
        assert!(main.level == Level::Warning && main.text.contains("100 bytes behind"), "{main:?}");
        assert!(split.level == Level::Warning && split.hint.contains("min-replicas-to-write"), "{split:?}");
        let silent = &replication(&info(60), 1, false)[0];
        assert!(silent.level == Level::Warning && silent.text.contains("60 s ago"), "{silent:?}");
        assert_eq!(replication(&info(1), 1, false)[0].level, Level::Fine);
        assert_eq!(replication(&info(1), 2, false)[0].level, Level::Fault);
    }

    #[test]
    fn slots_without_a_server_are_a_fault_and_those_of_a_silent_one_a_warning() {
        let info = |state: &str, ok: u32, pfail: u32, fail: u32| {
            bulk(&format!(
                "cluster_state:{state}\ncluster_slots_assigned:16384\ncluster_slots_ok:{ok}\n\
                 cluster_slots_pfail:{pfail}\ncluster_slots_fail:{fail}\ncluster_known_nodes:6\ncluster_size:3\n"
            ))
        };
        assert_eq!(cluster(&info("ok", 16384, 0, 0), Some("yes")).level, Level::Fine);
        assert_eq!(cluster(&info("ok", 11000, 5384, 0), Some("yes")).level, Level::Warning);
        assert_eq!(cluster(&info("fail", 11000, 0, 5384), Some("yes")).level, Level::Fault);
        assert_eq!(cluster(&info("ok", 11000, 0, 0), Some("no")).level, Level::Fault);
    }
}
