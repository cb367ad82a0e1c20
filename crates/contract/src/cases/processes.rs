//! What processes say of themselves: read by others, replaced, and gone by itself.

use std::time::Duration;

use taskonce_core::ErrorKind;
use taskonce_core::process::{LIFE_RANGE, SUMMARY_MAX};

use crate::stage::{Actor, Stage};

const LIFE: Duration = Duration::from_secs(60);
/// More publications than come between two looks at what is to be removed.
const MANY: usize = 70;

/// All that is said, each with its process.
async fn said(by: &Actor) -> Vec<(String, String)> {
    let processes = by.ledger.processes().await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    processes.iter().map(|process| (process.name.to_string(), text(&process.summary))).collect()
}

fn pairs(wanted: &[(&Actor, &str)]) -> Vec<(String, String)> {
    let mut pairs: Vec<_> = wanted.iter().map(|(actor, said)| (owner(actor), (*said).to_owned())).collect();
    pairs.sort();
    pairs
}

fn owner(actor: &Actor) -> String {
    actor.ledger.host().owner().to_string()
}

pub(super) async fn what_a_process_publishes_is_read_by_others(stage: Stage) {
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    assert_eq!(said(&b).await, []);
    let (mut of_a, mut of_b) = (a.ledger.publisher(LIFE).unwrap(), b.ledger.publisher(LIFE).unwrap());
    of_a.publish(b"{}").await.unwrap();
    of_b.publish(b"{\"running\": 1}").await.unwrap();
    let wanted = pairs(&[(&a, "{}"), (&b, "{\"running\": 1}")]);
    assert_eq!((said(&a).await, said(&b).await), (wanted.clone(), wanted));
    of_b.withdraw().await.unwrap();
    assert_eq!(said(&a).await, pairs(&[(&a, "{}")]), "who ends takes it back");
}

pub(super) async fn what_a_process_says_takes_the_place_of_what_it_said(stage: Stage) {
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let mut of_a = a.ledger.publisher(LIFE).unwrap();
    let last = MANY.to_string();
    for number in 0..=MANY {
        of_a.publish(number.to_string().as_bytes()).await.unwrap();
    }
    assert_eq!(said(&b).await, pairs(&[(&a, &last)]));
    // Another publisher of the same process, as after an error whose outcome is unknown.
    let mut again = a.ledger.publisher(LIFE).unwrap();
    again.publish(b"again").await.unwrap();
    of_a.publish(b"both").await.unwrap();
    assert_eq!(said(&b).await, pairs(&[(&a, "both")]));
}

pub(super) async fn what_a_process_said_expires_unless_it_is_said_again(stage: Stage) {
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    // So that the time that passes is theirs too.
    for actor in [&a, &b] {
        let _key = stage.key_of("taskonce", "process", &owner(actor));
    }
    let (mut of_a, mut of_b) = (a.ledger.publisher(LIFE).unwrap(), b.ledger.publisher(LIFE).unwrap());
    of_a.publish(b"1").await.unwrap();
    of_b.publish(b"1").await.unwrap();
    stage.pass(LIFE / 2).await;
    of_a.publish(b"2").await.unwrap();
    stage.pass(LIFE * 2 / 3).await;
    assert_eq!(said(&b).await, pairs(&[(&a, "2")]));
    let age = b.ledger.processes().await.unwrap()[0].age;
    assert!(age >= LIFE * 2 / 3 && age < LIFE, "{age:?}");
    of_b.publish(b"3").await.unwrap();
    assert_eq!(said(&b).await, pairs(&[(&a, "2"), (&b, "3")]), "it lives after all");
}

pub(super) async fn what_processes_said_that_ended_is_removed_by_others(stage: Stage) {
    let (a, b) = (stage.actor("a"), stage.actor("b"));
    let key = stage.key_of("taskonce", "process", &owner(&a));
    a.ledger.publisher(LIFE).unwrap().publish(b"1").await.unwrap();
    stage.pass(LIFE * 2).await;
    b.ledger.publisher(LIFE).unwrap().publish(b"1").await.unwrap();
    assert_eq!(stage.store().load(&key).await.unwrap(), None);
    assert_eq!(said(&a).await, pairs(&[(&b, "1")]));
}

pub(super) async fn a_summary_has_bounds(stage: Stage) {
    let a = stage.actor("a");
    let mut publisher = a.ledger.publisher(LIFE).unwrap();
    publisher.publish(&[b'x'; SUMMARY_MAX]).await.unwrap();
    let error = publisher.publish(&[b'x'; SUMMARY_MAX + 1]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadOutput, "{error:?}");
    assert_eq!(said(&a).await[0].1.len(), SUMMARY_MAX, "what was said before stays");
    publisher.publish(b"").await.unwrap();
    assert_eq!(said(&a).await, pairs(&[(&a, "")]));
    for life in [Duration::ZERO, *LIFE_RANGE.end() * 2] {
        let Err(error) = a.ledger.publisher(life) else { panic!("{life:?} must be refused") };
        assert_eq!(error.kind(), ErrorKind::BadPolicy, "{error:?}");
    }
}
