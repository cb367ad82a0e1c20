//! What Sentinels say of the primary.
//!
//! Where they differ, the one that has seen the latest switch is right. One that was cut off for a while, and knows only
//! an earlier primary, is not believed against what was seen before, also when no other is heard.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use taskonce_core::ErrorKind;
use tokio::time::timeout;

use crate::address::{Address, list};
use crate::dial::Dial;
use crate::fault::Refusal;
use crate::lines::Lines;
use crate::primary::{Reached, each};
use crate::wire::{Commands, Reply};

/// How long a connection to the primary may take before the Sentinels are asked whether it is still the primary.
const ASK_AGAIN: Duration = Duration::from_millis(250);

/// What to do when a Sentinel asks for another user or password.
const LOGIN_HINT: &str = "give the Sentinels' own `sentinel_user` and `sentinel_password`";

/// The Sentinels of a service, as one runtime of one process knows them.
pub(crate) struct Sentinels {
    dial: Dial,
    addresses: Vec<Address>,
    service: String,
    lines: Arc<Lines>,
    /// The number of the latest switch that was seen.
    epoch: AtomicU64,
}

/// What a Sentinel knows of the primary.
#[derive(Debug)]
pub(crate) struct Word {
    pub(crate) address: Address,
    /// The number of the switch that made it the primary.
    pub(crate) epoch: u64,
}

impl Sentinels {
    pub(crate) fn new(dial: Dial, addresses: Vec<Address>, service: String) -> Sentinels {
        Sentinels { dial, addresses, service, lines: Arc::default(), epoch: AtomicU64::new(0) }
    }

    /// A connection to the server that the Sentinels name as the primary. A server that does not say itself that it is
    /// the primary is not used.
    ///
    /// A connection that takes long is not waited for when they have come to name another.
    pub(crate) async fn connect(&self, others_wait: Duration) -> Result<Reached, Refusal> {
        let mut word = self.resolve(others_wait).await?;
        loop {
            let address = word.address.clone();
            let mut connecting = std::pin::pin!(self.dial.connect(&address));
            word = loop {
                if let Ok(answer) = timeout(ASK_AGAIN, &mut connecting).await {
                    return reached(word, answer);
                }
                if let Ok(Ok(newer)) = timeout(ASK_AGAIN, self.resolve(others_wait)).await
                    && word.is_left_for(&newer)
                {
                    break newer;
                }
            };
        }
    }

    /// Where the Sentinels say that the primary is. When one has answered, the others get `others_wait` more.
    pub(crate) async fn resolve(&self, others_wait: Duration) -> Result<Word, Refusal> {
        let (mut words, mut faults) = (Vec::new(), Vec::new());
        let ask = |sentinel: Address| {
            let (dial, service, lines) = (self.dial.clone(), self.service.clone(), Arc::clone(&self.lines));
            async move { ask_one(&dial, &lines, &sentinel, &service).await }
        };
        each(&self.addresses, others_wait, ask, |sentinel, answer| {
            match answer {
                Ok(word) => words.push(word),
                Err(refusal) => faults.push((sentinel, refusal)),
            }
            !words.is_empty()
        })
        .await;
        match self.latest(words) {
            Some(word) => word,
            None => Err(self.no_word(faults)),
        }
    }

    /// The latest of these words, if they are not all older than what is known.
    fn latest(&self, words: Vec<Word>) -> Option<Result<Word, Refusal>> {
        let heard = words.len();
        let latest = words.into_iter().max_by_key(|word| word.epoch)?;
        let known = self.epoch.load(Ordering::Relaxed);
        // Switches are counted anew when a service is removed and watched again: most of them say so then.
        if latest.epoch < known && heard * 2 <= self.addresses.len() {
            let said = format!("the Sentinels that answer know only an earlier primary, `{}`", latest.address);
            return Some(Err(Refusal::new(ErrorKind::Unreachable, said)
                .hint("see that most of the Sentinels run and reach one another; try again")));
        }
        self.epoch.store(latest.epoch, Ordering::Relaxed);
        Some(Ok(latest))
    }

    fn no_word(&self, faults: Vec<(Address, Refusal)>) -> Refusal {
        let is_any_silent = faults.iter().any(|(_, refusal)| refusal.may_pass());
        let causes = faults.into_iter().map(|(sentinel, refusal)| refusal.of_sentinel(sentinel)).collect();
        match Refusal::of_all(causes) {
            Some(refusal) if !is_any_silent => refusal,
            Some(refusal) => {
                let said = format!("no Sentinel names the primary: {}", refusal.message());
                refusal.or_hint("check that the Sentinels run and that their addresses are right").saying(said)
            }
            None => Refusal::new(ErrorKind::Unreachable, format!("no Sentinel of {} answers", list(&self.addresses))),
        }
    }
}

impl Word {
    /// Whether a connection by this word is to be left for another. Sentinels may name one server by its name and by its
    /// address: only another switch is a reason.
    pub(crate) fn is_left_for(&self, newer: &Word) -> bool {
        self.epoch != newer.epoch && self.address != newer.address
    }
}

fn reached(word: Word, answer: Result<Reached, Refusal>) -> Result<Reached, Refusal> {
    let address = &word.address;
    match answer.map_err(|refusal| refusal.of(address))? {
        reached if reached.server.is_replica => Err(Refusal::new(
            ErrorKind::ReadOnly,
            format!("the Sentinels name `{address}` as the primary, which says that it is a replica"),
        )
        .hint("a switch is under way; try again")),
        reached => Ok(Reached { epoch: word.epoch, ..reached }),
    }
}

async fn ask_one(dial: &Dial, lines: &Lines, sentinel: &Address, service: &str) -> Result<Word, Refusal> {
    let mut commands = Commands::default();
    // The second names the new primary earlier during a switch, and the first knows the number of the switch.
    commands.add(&[b"SENTINEL", b"MASTER", service.as_bytes()]);
    commands.add(&[b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service.as_bytes()]);
    let connect = || dial.connect_to_sentinel(sentinel);
    let answers = lines.ask(sentinel, &commands, connect).await.map_err(|refusal| match refusal.kind() {
        ErrorKind::Denied => refusal.hint(LOGIN_HINT),
        _ => refusal,
    })?;
    let [known, address] = answers.as_slice() else { return Err(Refusal::misshapen("SENTINEL")) };
    for answer in [known, address] {
        if let Reply::Error(text) = answer {
            return Err(refused(text, service));
        }
    }
    let (Reply::List(pairs), Reply::List(parts)) = (known, address) else {
        return Err(unknown(service));
    };
    let epoch = pairs.chunks_exact(2).find(|pair| pair[0].text() == Some("config-epoch"));
    let epoch = epoch.and_then(|pair| pair[1].text()?.parse().ok()).unwrap_or(0);
    match parts.as_slice() {
        [host, port] => {
            let port = port.text().and_then(|port| port.parse().ok());
            match (host.text(), port) {
                (Some(host), Some(port)) => Ok(Word { address: Address::of(host, port, sentinel), epoch }),
                _ => Err(Refusal::misshapen("SENTINEL")),
            }
        }
        _ => Err(Refusal::misshapen("SENTINEL")),
    }
}

fn refused(text: &str, service: &str) -> Refusal {
    if text.contains("No such master") {
        return unknown(service);
    }
    let refusal = Refusal::of_reply(text);
    match refusal.kind() {
        ErrorKind::Unsupported => Refusal::new(ErrorKind::BadUrl, "this is no Sentinel, but a server that keeps keys")
            .hint("write its address as `redis://host:6379/0`, or give the Sentinels' port, which is mostly 26379"),
        ErrorKind::Denied => refusal.hint(LOGIN_HINT),
        _ => refusal,
    }
}

fn unknown(service: &str) -> Refusal {
    Refusal::new(ErrorKind::BadUrl, format!("the Sentinel knows no service `{service}`"))
        .hint("`redis-cli -p 26379 SENTINEL MASTERS` shows the names of those that it knows")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::{Further, Settings};

    fn word(host: &str, epoch: u64) -> Word {
        Word { address: Address { host: host.to_owned(), port: 1 }, epoch }
    }

    fn three() -> Sentinels {
        let further = Further { what: "store", known: &[], prefix: "", form: "", take: &mut |_, _| None };
        let settings = Settings::read("redis+sentinel://a,b,c/tasks", further).unwrap();
        let dial = Dial::new(&settings, &[]).unwrap_or_else(|refusal| panic!("{refusal:?}"));
        let addresses = ["a", "b", "c"].map(|host| Address { host: host.to_owned(), port: 26379 });
        Sentinels::new(dial, addresses.to_vec(), "tasks".to_owned())
    }

    #[test]
    fn a_sentinel_that_missed_a_switch_is_not_believed_against_what_was_seen() {
        let sentinels = three();
        let hear = |words: Vec<Word>| {
            let latest = sentinels.latest(words);
            latest.and_then(Result::ok).map(|word| word.address.host)
        };
        assert_eq!(hear(vec![word("old", 1), word("new", 2)]).as_deref(), Some("new"));
        assert_eq!(hear(vec![word("old", 1)]), None);
        assert_eq!(hear(vec![word("new", 2)]).as_deref(), Some("new"));
        // Most of them count anew.
        assert_eq!(hear(vec![word("anew", 0), word("anew", 0)]).as_deref(), Some("anew"));
        assert_eq!(hear(vec![word("anew", 0)]).as_deref(), Some("anew"));
        assert_eq!(hear(Vec::new()), None);
    }

    #[test]
    fn one_server_by_two_names_is_no_switch() {
        assert!(!word("name", 3).is_left_for(&word("10.0.0.1", 3)));
        assert!(!word("name", 3).is_left_for(&word("name", 4)));
        assert!(word("name", 3).is_left_for(&word("other", 4)));
    }
}
