//! What the steps of a handler promise: what ended is not run again, what is in doubt is not repeated, and code that
//! changed under a task is noticed.

#![allow(clippy::unwrap_used)] // test helpers outside of `#[test]` functions

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Bench, Fault, another, bench, policy, state, task, until};
use taskonce_core::codec;
use taskonce_core::decide::By;
use taskonce_core::key::{DownstreamKey, Task};
use taskonce_core::ledger::Admission;
use taskonce_core::policy::{Effect, Policy};
use taskonce_core::record::{Failure, FailureClass, Found, Output, Record, State};
use taskonce_core::step::{STEPS_BYTES_MAX, STEPS_MAX, StepState};
use taskonce_core::store::Store;
use taskonce_worker::{Context, Outcome, Run, StepContext};

const EVA: By<'static> = By { who: "eva", why: "the provider says so" };

/// The effects that steps had, in their order.
#[derive(Clone, Default)]
struct Effects(Arc<Mutex<Vec<(String, DownstreamKey)>>>);

impl Effects {
    fn note(&self, name: &str, step: &StepContext) {
        self.0.lock().unwrap().push((name.to_owned(), step.downstream_key()));
    }

    /// A step that has this effect and returns nothing.
    fn did(&self, name: &str, step: &StepContext) -> Result<(), Failure> {
        self.note(name, step);
        Ok(())
    }

    fn of(&self, name: &str) -> Vec<DownstreamKey> {
        self.0.lock().unwrap().iter().filter(|(of, _)| of == name).map(|(_, key)| *key).collect()
    }

    fn names(&self) -> Vec<String> {
        self.0.lock().unwrap().iter().map(|(name, _)| name.clone()).collect()
    }
}

async fn record(bench: &Bench, task: &Task) -> Arc<Record> {
    let found: Option<Found> = bench.memory.load(&task.key).await.unwrap();
    found.unwrap().record
}

/// Runs a task whose own effect may be repeated: what must not be is in its steps.
async fn attempt<T, F>(bench: &Bench, task: &Task, handler: impl FnOnce(Context) -> F + Send) -> Outcome<T>
where
    T: serde::Serialize + serde::de::DeserializeOwned + Send,
    F: Future<Output = Result<T, Failure>> + Send,
{
    bench.ledger.run(task, &policy(Effect::Repeatable), handler).await.unwrap()
}

#[track_caller]
fn failed<T: std::fmt::Debug>(outcome: Outcome<T>) -> (Failure, State) {
    match outcome {
        Outcome::Failed { failure, record: Some(record) } => (failure, record.state),
        other => panic!("the attempt failed; it was {other:?}"),
    }
}

#[track_caller]
fn parked<T: std::fmt::Debug>(outcome: Outcome<T>) -> Failure {
    let (failure, state) = failed(outcome);
    assert_eq!(state, State::Parked, "{failure:?}");
    failure
}

/// A run that is cut off inside this step, in a process that writes nothing any more. Its lease has passed.
async fn cut_off_inside(bench: &Bench, task: &Task, name: &str, effect: Effect) {
    let dying = another(bench);
    let (inside, reached) = tokio::sync::oneshot::channel();
    let run = attempt(&dying, task, |context| async move {
        context
            .step(name, effect, |_| async {
                inside.send(()).unwrap();
                std::future::pending::<Result<(), Failure>>().await
            })
            .await
    });
    tokio::select! {
        biased;
        outcome = run => panic!("it hangs: {outcome:?}"),
        reached = reached => {
            reached.unwrap();
            for state in State::ALL {
                dying.store.fail(state, Fault::Refused, usize::MAX);
            }
        }
    }
    bench.memory.age_by(&task.key, 60_000);
}

#[tokio::test]
async fn a_recorded_step_is_replayed_and_not_run() {
    let (bench, effects, task) = (bench(), Effects::default(), task("replayed"));
    for round in 1..=3 {
        let effects = effects.clone();
        let outcome = attempt(&bench, &task, |context| async move {
            let one: u32 = context
                .step("one", Effect::Keyed, async |step| {
                    Ok({
                        effects.note("one", &step);
                        41
                    })
                })
                .await?;
            let two: String = context
                .step_of("two", Effect::Unrepeatable)
                .input(&one)
                .run(async |step| {
                    Ok({
                        effects.note("two", &step);
                        format!("after {one}")
                    })
                })
                .await?;
            assert_eq!(context.attempt(), round);
            if round < 3 { Err(Failure::retryable("later")) } else { Ok((one, two)) }
        })
        .await;
        if round == 3 {
            assert!(
                matches!(&outcome, Outcome::Ran { value, .. } if *value == (41, "after 41".to_owned())),
                "{outcome:?}"
            );
        }
    }
    assert_eq!(effects.names(), ["one", "two"]);
}

#[tokio::test]
async fn what_a_step_returns_keeps_its_type() {
    async fn twice<T>(bench: &Bench, id: &str, value: T)
    where
        T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug + Clone + Send + Sync,
    {
        let task = task(id);
        for round in 0..2 {
            let given = value.clone();
            let outcome = attempt(bench, &task, |context| async move {
                let value = context
                    .step(
                        "only",
                        Effect::Keyed,
                        async |_| if round == 0 { Ok(given) } else { panic!("it was recorded") },
                    )
                    .await?;
                if round == 0 { Err(Failure::retryable("later")) } else { Ok::<T, Failure>(value) }
            })
            .await;
            if round == 1 {
                assert_eq!(outcome.into_value(), Some(value.clone()), "{id}");
            }
        }
    }
    let bench = bench();
    twice(&bench, "unit", ()).await;
    twice(&bench, "none", None::<u8>).await;
    twice(&bench, "some", Some(0_u8)).await;
    twice(&bench, "zero", 0_u64).await;
    twice(&bench, "empty", String::new()).await;
    twice(&bench, "false", false).await;
    twice(&bench, "list", Vec::<String>::new()).await;
    twice(&bench, "json", serde_json::json!({ "a": null })).await;
    twice(&bench, "result", Err::<u8, String>("declined".into())).await;
}

/// One step of a script: its name, effect and input.
type Line = (&'static str, Effect, u32);

/// Runs a script of steps and fails behind them; then another script in its place, and says how that was parked.
async fn changed(id: &str, before: &[Line], after: &[Line]) -> Failure {
    let (bench, task) = (bench(), task(id));
    let effects = Effects::default();
    async fn play(context: Context, lines: Vec<Line>, effects: Effects) -> Result<(), Failure> {
        for (name, effect, input) in lines {
            context.step_of(name, effect).input(&input).run(async |step| effects.did(name, &step)).await?;
        }
        Ok(())
    }
    let (lines, noted) = (before.to_vec(), effects.clone());
    let first = attempt(&bench, &task, |context| async move {
        play(context, lines, noted).await?;
        Err::<(), _>(Failure::retryable("later"))
    });
    assert_eq!(failed(first.await).1, State::Waiting);
    let (lines, noted) = (after.to_vec(), effects.clone());
    let failure = parked(attempt(&bench, &task, |context| play(context, lines, noted)).await);
    assert_eq!(effects.names().len(), before.len(), "no step ran: {:?}", effects.names());
    assert_eq!(failure.class, FailureClass::StepChanged);
    failure
}

#[track_caller]
fn shows(failure: &Failure, parts: &[&str]) {
    for part in parts {
        assert!(failure.message.contains(part), "`{part}` in: {}", failure.message);
    }
}

#[tokio::test]
async fn a_step_with_another_name_parks_with_both_shown() {
    let failure = changed("name", &[("charge", Effect::Keyed, 1)], &[("bill", Effect::Keyed, 1)]).await;
    shows(&failure, &["step 1 was `charge` (keyed", "now asks for `bill` (keyed"]);
}

#[tokio::test]
async fn a_step_with_another_input_parks_with_both_shown() {
    let failure = changed("input", &[("charge", Effect::Keyed, 1)], &[("charge", Effect::Keyed, 2)]).await;
    let digests: Vec<&str> =
        failure.message.split("input ").skip(1).map(|part| part.split(')').next().unwrap()).collect();
    assert!(digests.len() == 2 && digests[0] != digests[1], "{}", failure.message);
}

#[tokio::test]
async fn a_step_of_another_kind_parks_with_both_shown() {
    let failure = changed("kind", &[("charge", Effect::Keyed, 1)], &[("charge", Effect::Unrepeatable, 1)]).await;
    shows(&failure, &["`charge` (keyed", "`charge` (unrepeatable"]);
}

#[tokio::test]
async fn steps_in_another_order_park() {
    let (a, b) = (("charge", Effect::Keyed, 1), ("mail", Effect::Keyed, 1));
    shows(&changed("order", &[a, b], &[b, a]).await, &["step 1 was `charge`", "now asks for `mail`"]);
}

#[tokio::test]
async fn a_removed_step_parks() {
    let (a, b) = (("charge", Effect::Keyed, 1), ("mail", Effect::Keyed, 1));
    shows(&changed("first removed", &[a, b], &[b]).await, &["step 1 was `charge`", "now asks for `mail`"]);
    shows(&changed("last removed", &[a, b], &[a]).await, &["step 2 was `mail`", "now ends after 1 steps"]);
}

#[tokio::test]
async fn a_step_added_between_parks() {
    let (a, b) = (("charge", Effect::Keyed, 1), ("mail", Effect::Keyed, 1));
    let added = ("check", Effect::Repeatable, 1);
    shows(&changed("added", &[a, b], &[a, added, b]).await, &["step 2 was `mail`", "now asks for `check`"]);
}

#[tokio::test]
async fn a_step_added_behind_the_others_runs() {
    let (bench, task, effects) = (bench(), task("appended"), Effects::default());
    for names in [&["charge"][..], &["charge", "mail"]] {
        let noted = effects.clone();
        let outcome = attempt(&bench, &task, |context| async move {
            for name in names {
                context.step(name, Effect::Keyed, async |step| noted.did(name, &step)).await?;
            }
            if names.len() == 1 { Err(Failure::retryable("later")) } else { Ok(()) }
        })
        .await;
        assert_eq!(matches!(outcome, Outcome::Ran { .. }), names.len() == 2);
    }
    assert_eq!(effects.names(), ["charge", "mail"]);
}

#[tokio::test]
async fn two_steps_of_one_name_park() {
    let (bench, task, effects) = (bench(), task("twins"), Effects::default());
    let noted = effects.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        for _ in 0..2 {
            context.step("mail", Effect::Keyed, async |step| noted.did("mail", &step)).await?;
        }
        Ok(())
    })
    .await;
    shows(&parked(outcome), &["step 2 is named `mail` like step 1"]);
    assert_eq!(effects.names(), ["mail"]);
}

#[tokio::test]
async fn a_keyed_step_keeps_its_downstream_key_over_attempts() {
    let (bench, task, effects) = (bench(), task("keys"), Effects::default());
    for _ in 0..3 {
        let noted = effects.clone();
        let outcome = attempt(&bench, &task, |context| async move {
            context.step("other", Effect::Keyed, async |step| noted.did("other", &step)).await?;
            context
                .step("charge", Effect::Keyed, async |step| {
                    noted.note("charge", &step);
                    Err::<(), _>(Failure::retryable("timed out"))
                })
                .await
        });
        assert_eq!(failed(outcome.await).1, State::Waiting);
    }
    let keys = effects.of("charge");
    assert_eq!(keys, vec![task.key.downstream("charge"); 3]);
    assert_ne!(effects.of("other"), [keys[0]]);
}

#[tokio::test]
async fn an_unrepeatable_step_writes_its_intent_first() {
    let (bench, task) = (bench(), task("intent"));
    let memory = bench.memory.clone();
    let key = task.key.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        context
            .step("mail", Effect::Unrepeatable, async |_| {
                let there = memory.load(&key).await.unwrap().unwrap().record;
                Ok((there.steps[0].name.clone(), there.steps[0].state == StepState::Begun))
            })
            .await
    })
    .await;
    assert_eq!(outcome.into_value(), Some(("mail".to_owned(), true)));
    let ended = &record(&bench, &task).await.steps[0];
    assert_eq!((ended.state, ended.attempt), (StepState::Done, 1));
}

#[tokio::test]
async fn a_run_cut_off_inside_an_unrepeatable_step_parks_the_next_whatever_the_task_says() {
    for effect in [Effect::Repeatable, Effect::Keyed] {
        let (bench, task, effects) = (bench(), task("cut off"), Effects::default());
        cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
        let policy = policy(effect);
        let run = bench.ledger.run(&task, &policy, |context| {
            let effects = effects.clone();
            async move { context.step("mail", Effect::Unrepeatable, async |step| effects.did("mail", &step)).await }
        });
        let failure = parked(run.await.unwrap());
        assert_eq!(failure.class, FailureClass::StepInDoubt);
        shows(&failure, &["step `mail` began and must not be repeated"]);
        assert_eq!(effects.names(), [""; 0]);
    }
}

#[tokio::test]
async fn a_run_cut_off_inside_a_keyed_step_runs_it_again() {
    let (bench, task, effects) = (bench(), task("keyed again"), Effects::default());
    cut_off_inside(&bench, &task, "charge", Effect::Keyed).await;
    let noted = effects.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        context.step("charge", Effect::Keyed, async |step| noted.did("charge", &step)).await
    })
    .await;
    assert!(matches!(outcome, Outcome::Ran { .. }), "{outcome:?}");
    assert_eq!(effects.of("charge"), [task.key.downstream("charge")]);
}

#[tokio::test]
async fn what_a_probe_finds_is_recorded_and_the_task_goes_on() {
    let (bench, task) = (bench(), task("probe finds"));
    cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
    let probed = Arc::new(AtomicUsize::new(0));
    for round in 0..2 {
        let asked = Arc::clone(&probed);
        let outcome = attempt(&bench, &task, |context| async move {
            let sent: String = context
                .step_of("mail", Effect::Unrepeatable)
                .run_or_ask(
                    async |step| {
                        asked.fetch_add(1, Ordering::SeqCst);
                        Ok(Some(step.downstream_key().to_string()))
                    },
                    async |_| panic!("it must not be repeated"),
                )
                .await?;
            if round == 0 { Err(Failure::retryable("later")) } else { Ok(sent) }
        })
        .await;
        if round == 1 {
            assert_eq!(outcome.into_value(), Some(task.key.downstream("mail").to_string()));
        }
    }
    assert_eq!(probed.load(Ordering::SeqCst), 1, "what it found is recorded");
}

#[tokio::test]
async fn a_probe_that_finds_nothing_parks_too() {
    let (bench, task, effects) = (bench(), task("probe finds nothing"), Effects::default());
    cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
    let noted = effects.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        context
            .step_of("mail", Effect::Unrepeatable)
            .run_or_ask(async |_| Ok(None), async |step| noted.did("mail", &step))
            .await
    })
    .await;
    shows(&parked(outcome), &["`mail`", "its probe found nothing"]);
    assert_eq!(effects.names(), [""; 0]);
}

#[tokio::test]
async fn a_probe_that_fails_is_asked_again_by_the_next_attempt_and_parks_with_the_last() {
    let (bench, task) = (bench(), task("probe fails"));
    cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
    let policy = Policy { attempts_max: 3, ..policy(Effect::Repeatable) };
    for (attempt, wanted) in [(2, State::Waiting), (3, State::Parked)] {
        let run = bench.ledger.run(&task, &policy, |context| async move {
            assert_eq!(context.attempt(), attempt);
            context
                .step_of("mail", Effect::Unrepeatable)
                .run_or_ask(async |_| Err(Failure::retryable("the provider is away")), async |_| Ok(()))
                .await
        });
        assert_eq!(failed(run.await.unwrap()).1, wanted);
    }
}

#[tokio::test]
async fn an_unrepeatable_step_that_failed_runs_again_only_where_nothing_happened() {
    let (bench, effects) = (bench(), Effects::default());
    for (id, harmless) in [("harmless", true), ("in doubt", false)] {
        let task = task(id);
        let noted = effects.clone();
        let outcome = attempt(&bench, &task, |context| async move {
            context
                .step("mail", Effect::Unrepeatable, async |step| {
                    noted.note(id, &step);
                    let failure = Failure::retryable("refused");
                    Err::<(), _>(if harmless { failure.nothing_happened() } else { failure })
                })
                .await
        })
        .await;
        let (failure, state) = failed(outcome);
        if harmless {
            assert_eq!((state, record(&bench, &task).await.steps.len()), (State::Waiting, 0));
        } else {
            assert_eq!((state, failure.class), (State::Parked, FailureClass::StepInDoubt));
            shows(&failure, &["`mail` failed and must not be repeated: refused"]);
            continue;
        }
        let noted = effects.clone();
        let outcome = attempt(&bench, &task, |context| async move {
            context.step("mail", Effect::Unrepeatable, async |step| noted.did(id, &step)).await
        });
        assert!(matches!(outcome.await, Outcome::Ran { .. }));
    }
    assert_eq!((effects.of("harmless").len(), effects.of("in doubt").len()), (2, 1));
}

#[tokio::test]
async fn a_handler_that_swallows_the_stop_still_parks() {
    let (bench, task) = (bench(), task("swallowed"));
    cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
    let effects = Effects::default();
    let noted = effects.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        let sent: Result<(), Failure> = context.step("mail", Effect::Unrepeatable, async |_| Ok(())).await;
        assert!(sent.is_err());
        let next = context.step("invoice", Effect::Keyed, async |step| noted.did("invoice", &step)).await;
        assert_eq!(next.unwrap_err().class, FailureClass::StepInDoubt, "no further step runs");
        Ok(())
    })
    .await;
    assert_eq!(parked(outcome).class, FailureClass::StepInDoubt);
    assert_eq!(effects.names(), [""; 0]);
}

#[tokio::test]
async fn a_handler_that_hangs_behind_the_stop_still_parks() {
    let (bench, task) = (bench(), task("hangs"));
    cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
    let policy = Policy { run_max: Some(Duration::from_millis(50)), ..policy(Effect::Repeatable) };
    let run = bench.ledger.run(&task, &policy, |context| async move {
        let sent: Result<(), Failure> = context.step("mail", Effect::Unrepeatable, async |_| Ok(())).await;
        assert!(sent.is_err());
        std::future::pending::<Result<(), Failure>>().await
    });
    assert_eq!(parked(run.await.unwrap()).class, FailureClass::StepInDoubt);
}

/// A handler that stops waiting for its step has not learnt what became of it.
#[tokio::test]
async fn a_handler_that_gives_up_an_unrepeatable_step_does_not_complete() {
    let (bench, task) = (bench(), task("given up"));
    let memory = bench.memory.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        let mut mail = std::pin::pin!(
            context
                .step("mail", Effect::Unrepeatable, |_| async { std::future::pending::<Result<(), Failure>>().await })
        );
        let begun = until("the step begins", || async {
            memory.load(context.key()).await.unwrap().is_some_and(|found| !found.record.steps.is_empty())
        });
        tokio::select! {
            _ = &mut mail => panic!("it hangs"),
            () = begun => Ok(()),
        }
    })
    .await;
    let failure = parked(outcome);
    assert_eq!(failure.class, FailureClass::StepInDoubt);
    shows(&failure, &["`mail`"]);
}

#[tokio::test]
async fn a_step_that_runs_longer_than_run_max_is_in_doubt() {
    let bench = bench();
    for (id, attempts_max, wanted) in [("one attempt", 1, State::Parked), ("two", 2, State::Waiting)] {
        let run_max = Some(Duration::from_millis(50));
        let policy = Policy { run_max, attempts_max, ..policy(Effect::Repeatable) };
        let task = task(id);
        let run = bench.ledger.run(&task, &policy, |context| async move {
            context
                .step("mail", Effect::Unrepeatable, |_| async { std::future::pending::<Result<(), Failure>>().await })
                .await
        });
        let (failure, state) = failed(run.await.unwrap());
        assert_eq!((failure.class, state), (FailureClass::RanTooLong, wanted));
        assert_eq!(record(&bench, &task).await.steps[0].state, StepState::Begun);
    }
}

#[tokio::test]
async fn a_lost_claim_cannot_record_a_step() {
    let (bench, task) = (bench(), task("lost"));
    let successor = another(&bench);
    let (memory, wanted) = (bench.memory.clone(), task.clone());
    // The step's code blocks, so that it cannot be cancelled.
    let outcome = attempt(&bench, &task, |context| async move {
        context
            .step("charge", Effect::Keyed, async |_| {
                memory.age_by(&wanted.key, 60_000);
                let admission = successor.ledger.claim(&wanted, &policy(Effect::Keyed)).await.unwrap();
                let Admission::Run(claim) = admission else { panic!("{admission:?}") };
                std::mem::forget(claim);
                Ok(())
            })
            .await
    })
    .await;
    assert!(matches!(outcome, Outcome::ClaimLost { .. }), "{outcome:?}");
    let there = record(&bench, &task).await;
    assert_eq!((there.attempt, there.steps.len()), (2, 0));
}

#[tokio::test]
async fn a_step_is_recorded_once_whatever_becomes_of_the_answers() {
    for fault in [Fault::Refused, Fault::AnswerLost] {
        for effect in [Effect::Keyed, Effect::Unrepeatable] {
            let (bench, task, effects) = (bench(), task("answers"), Effects::default());
            let (store, noted) = (Arc::clone(&bench.store), effects.clone());
            let outcome = attempt(&bench, &task, |context| async move {
                store.fail(State::Running, fault, 2);
                let one: u8 = context
                    .step("one", effect, async |step| {
                        noted.note("one", &step);
                        store.fail(State::Running, fault, 2);
                        Ok(1)
                    })
                    .await?;
                let two: u8 = context
                    .step("two", effect, async |step| {
                        Ok({
                            noted.note("two", &step);
                            2
                        })
                    })
                    .await?;
                Ok(one + two)
            })
            .await;
            assert!(matches!(outcome, Outcome::Ran { value: 3, .. }), "{outcome:?}");
            assert_eq!(effects.names(), ["one", "two"]);
            let steps: Vec<_> = record(&bench, &task).await.steps.iter().map(|step| step.state).collect();
            assert_eq!(steps, [StepState::Done, StepState::Done]);
        }
    }
}

#[tokio::test]
async fn an_unrepeatable_step_whose_intent_cannot_be_written_does_not_run() {
    let (bench, task, effects) = (bench(), task("no intent"), Effects::default());
    let (store, noted) = (Arc::clone(&bench.store), effects.clone());
    let outcome = attempt(&bench, &task, |context| async move {
        store.fail(State::Running, Fault::Never, 1);
        context.step("mail", Effect::Unrepeatable, async |step| noted.did("mail", &step)).await
    })
    .await;
    let (failure, state) = failed(outcome);
    assert_eq!(state, State::Waiting, "nothing happened, so nothing is in doubt");
    shows(&failure, &["a step could not be recorded"]);
    assert_eq!((effects.names().len(), record(&bench, &task).await.steps.len()), (0, 0));
}

/// Once the next run parked, though the process knew that the step had not begun.
#[tokio::test]
async fn a_step_whose_intent_is_stored_unheard_and_that_did_not_begin_is_not_in_doubt() {
    let (bench, task, effects) = (bench(), task("unheard"), Effects::default());
    let store = Arc::clone(&bench.store);
    let outcome = attempt(&bench, &task, |context| async move {
        store.fail(State::Running, Fault::AnswerLost, usize::MAX);
        context
            .step::<(), _>("mail", Effect::Unrepeatable, |_| async { panic!("its intent is not known to be stored") })
            .await
    })
    .await;
    bench.store.heal();
    drop(outcome);
    until("the attempt has ended", || async { state(&bench, &task).await == Some(State::Waiting) }).await;
    assert_eq!(record(&bench, &task).await.steps, [], "nothing is in doubt");
    let noted = effects.clone();
    let again = attempt(&bench, &task, |context| async move {
        context.step("mail", Effect::Unrepeatable, async |step| noted.did("mail", &step)).await
    });
    assert!(matches!(again.await, Outcome::Ran { .. }));
    assert_eq!(effects.names().len(), 1);
}

#[tokio::test]
async fn an_unrepeatable_step_that_cannot_be_recorded_parks_the_next_run() {
    let (bench, task) = (bench(), task("no record"));
    let store = Arc::clone(&bench.store);
    let outcome = attempt(&bench, &task, |context| async move {
        context
            .step("mail", Effect::Unrepeatable, async |_| {
                store.fail(State::Running, Fault::Never, 1);
                Ok(())
            })
            .await
    })
    .await;
    assert_eq!(failed(outcome).1, State::Waiting);
    let again = attempt(&bench, &task, |context| async move {
        context.step::<(), _>("mail", Effect::Unrepeatable, |_| async { panic!("it must not be repeated") }).await
    });
    assert_eq!(parked(again.await).class, FailureClass::StepInDoubt);
}

#[tokio::test]
async fn what_is_too_much_of_steps_is_a_clear_error() {
    let bench = bench();
    let long = "x".repeat(129);
    for (index, name) in ["", &long, "a\nb"].into_iter().enumerate() {
        let name = name.to_owned();
        let task = task(&format!("name {index}"));
        let outcome = attempt(&bench, &task, |context| async move {
            context.step::<(), _>(&name, Effect::Keyed, |_| async { panic!("it has no name") }).await
        });
        let (failure, state) = failed(outcome.await);
        assert_eq!(state, State::Dead);
        shows(&failure, &["is no name of a step: it has 1 to 128 bytes and no control characters"]);
    }
    let lots = task("many");
    let many = attempt(&bench, &lots, |context| async move {
        for place in 0..=STEPS_MAX {
            context.step(&format!("step {place}"), Effect::Keyed, async |_| Ok(place)).await?;
        }
        Ok(())
    });
    shows(&failed(many.await).0, &["step `step 64` is one more than the 64 that a task may have"]);
    let much = task("much");
    let outcome = attempt(&bench, &much, |context| async move {
        context.step("half", Effect::Keyed, async |_| Ok("x".repeat(STEPS_BYTES_MAX / 2))).await?;
        context.step("more", Effect::Unrepeatable, async |_| Ok("x".repeat(STEPS_BYTES_MAX / 2))).await?;
        Ok(())
    });
    let (failure, state) = failed(outcome.await);
    shows(&failure, &["step `more`", "bytes of output; 1048576 are kept"]);
    assert_eq!(state, State::Parked, "the step took effect, and that is not recorded");
}

#[tokio::test]
async fn what_cannot_be_encoded_is_a_clear_error() {
    /// A value that has no encoding.
    struct Odd;
    impl serde::Serialize for Odd {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom("odd"))
        }
    }
    impl<'de> serde::Deserialize<'de> for Odd {
        fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Ok(Odd)
        }
    }
    let bench = bench();
    let (one, other) = (task("output"), task("input"));
    let output = attempt(&bench, &one, |context| async move {
        context.step("odd", Effect::Keyed, async |_| Ok(Odd)).await.map(drop)
    });
    shows(&failed(output.await).0, &["what step `odd` returned cannot be encoded"]);
    let input = attempt(&bench, &other, |context| async move {
        context.step_of("odd", Effect::Keyed).input(&f64::NAN).run(async |_| Ok(())).await
    });
    shows(&failed(input.await).0, &["the input of step `odd` has no canonical form"]);
}

#[tokio::test]
async fn what_a_step_returned_is_not_read_as_another_type() {
    let (bench, task) = (bench(), task("other type"));
    let first = attempt(&bench, &task, |context| async move {
        context.step("charge", Effect::Keyed, async |_| Ok("text".to_owned())).await?;
        Err::<(), _>(Failure::retryable("later"))
    });
    failed(first.await);
    let second = attempt(&bench, &task, |context| async move {
        context.step::<u64, _>("charge", Effect::Keyed, |_| async { Ok(1) }).await.map(drop)
    });
    let failure = parked(second.await);
    assert_eq!(failure.class, FailureClass::StepChanged);
    shows(&failure, &["what step `charge` returned cannot be read"]);
}

#[tokio::test]
async fn steps_that_are_polled_together_run_one_after_the_other() {
    let (bench, task) = (bench(), task("together"));
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let outcome = attempt(&bench, &task, |context| {
        let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
        async move {
            let one = async |step: StepContext| {
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                inside.fetch_sub(1, Ordering::SeqCst);
                Ok(step.attempt())
            };
            let (a, b, c) = tokio::join!(
                context.step("a", Effect::Keyed, one),
                context.step("b", Effect::Unrepeatable, one),
                context.step("c", Effect::Keyed, one),
            );
            Ok(a? + b? + c?)
        }
    })
    .await;
    assert!(matches!(outcome, Outcome::Ran { value: 3, .. }), "{outcome:?}");
    assert_eq!(most.load(Ordering::SeqCst), 1);
    let names: Vec<String> = record(&bench, &task).await.steps.iter().map(|step| step.name.clone()).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

/// It waited for itself, with its heartbeat going on.
#[tokio::test]
async fn a_step_inside_a_step_is_an_error_and_no_deadlock() {
    let (bench, task) = (bench(), task("nested"));
    let outcome = attempt(&bench, &task, |context| async move {
        let inner = context.clone();
        context
            .step("outer", Effect::Keyed, async |_| {
                inner.step::<(), _>("inner", Effect::Keyed, |_| async { Ok(()) }).await
            })
            .await
    });
    let outcome = tokio::time::timeout(Duration::from_secs(10), outcome).await.expect("it does not wait for itself");
    shows(&failed(outcome).0, &["step `inner` was asked for inside another step"]);
}

#[tokio::test]
async fn a_step_may_run_another_task_with_steps() {
    let (bench, task) = (bench(), task("outer"));
    let ledger = bench.ledger.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        context
            .step("outer", Effect::Keyed, async |_| {
                let (inner, policy) = (common::task("inner"), policy(Effect::Keyed));
                let run = ledger.run(&inner, &policy, |context| async move {
                    context.step("inner", Effect::Keyed, async |_| Ok(7_u8)).await
                });
                Ok(run.await?.into_value())
            })
            .await
    });
    assert_eq!(outcome.await.into_value(), Some(Some(7)));
}

#[tokio::test]
async fn no_step_runs_behind_one_that_failed() {
    let (bench, task, effects) = (bench(), task("passed over"), Effects::default());
    let noted = effects.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        let first = context.step("notify", Effect::Keyed, async |_| Err::<(), _>(Failure::retryable("away"))).await;
        assert!(first.is_err());
        context.step("charge", Effect::Keyed, async |step| noted.did("charge", &step)).await
    })
    .await;
    let (failure, state) = failed(outcome);
    assert_eq!(state, State::Waiting);
    shows(&failure, &["step `charge` was asked for behind step `notify`, which did not end"]);
    assert_eq!(effects.names(), [""; 0]);
}

#[tokio::test]
async fn a_step_that_failed_can_be_tried_again_by_the_same_run() {
    let (bench, task, effects) = (bench(), task("again"), Effects::default());
    let noted = effects.clone();
    let outcome = attempt(&bench, &task, |context| async move {
        for round in 0..3 {
            let tried: Result<u8, Failure> = context
                .step("charge", Effect::Keyed, async |step| {
                    noted.note("charge", &step);
                    if round == 2 { Ok(round) } else { Err(Failure::retryable("away")) }
                })
                .await;
            if let Ok(value) = tried {
                return Ok(value);
            }
        }
        Err(Failure::retryable("away"))
    })
    .await;
    assert!(matches!(outcome, Outcome::Ran { value: 2, .. }), "{outcome:?}");
    assert_eq!(effects.of("charge"), vec![task.key.downstream("charge"); 3]);
}

/// The refusal is a value, so every run takes the same way.
#[tokio::test]
async fn a_compensation_is_a_step_behind_a_recorded_refusal() {
    let (bench, task, effects) = (bench(), task("compensated"), Effects::default());
    for round in 0..2 {
        let noted = effects.clone();
        let outcome = attempt(&bench, &task, |context| async move {
            context.step("reserve", Effect::Keyed, async |step| noted.did("reserve", &step)).await?;
            let charged: bool = context
                .step("charge", Effect::Keyed, async |step| {
                    Ok({
                        noted.note("charge", &step);
                        false
                    })
                })
                .await?;
            if !charged {
                context.step("release", Effect::Keyed, async |step| noted.did("release", &step)).await?;
            }
            if round == 0 { Err(Failure::retryable("later")) } else { Ok(charged) }
        })
        .await;
        assert_eq!(matches!(outcome, Outcome::Ran { value: false, .. }), round == 1);
    }
    assert_eq!(effects.names(), ["reserve", "charge", "release"]);
}

#[tokio::test]
async fn a_step_that_the_store_cannot_keep_is_refused() {
    let (bench, task) = (bench(), task("forgetful"));
    let policy = Policy { store_may_forget: false, ..policy(Effect::Repeatable) };
    let run = bench.ledger.run(&task, &policy, |context| async move {
        context.step::<(), _>("mail", Effect::Unrepeatable, |_| async { panic!("it could be repeated") }).await
    });
    shows(&failed(run.await.unwrap()).0, &["step `mail` cannot run", "may forget what it acknowledged"]);
}

#[tokio::test]
async fn a_transactional_step_needs_its_transaction() {
    let (bench, task) = (bench(), task("transactional"));
    let outcome = attempt(&bench, &task, |context| async move {
        context.step::<(), _>("insert", Effect::Transactional, |_| async { panic!("it has no transaction") }).await
    });
    shows(&failed(outcome.await).0, &["step `insert` is transactional: run it with `step_in`"]);
}

#[tokio::test]
async fn a_handler_that_returns_beside_its_own_step_does_not_complete() {
    let (bench, task) = (bench(), task("beside"));
    let outcome = attempt(&bench, &task, |context| async move {
        let (inside, reached) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let hang = async |_| {
                inside.send(()).unwrap();
                std::future::pending::<Result<(), Failure>>().await
            };
            context.step("mail", Effect::Keyed, hang).await
        });
        reached.await.unwrap();
        Ok(())
    });
    let (failure, state) = failed(tokio::time::timeout(Duration::from_secs(10), outcome).await.expect("no deadlock"));
    shows(&failure, &["still under way"]);
    assert_eq!(state, State::Waiting);
}

#[tokio::test]
async fn a_person_resolves_the_step_and_the_task_goes_on_behind_it() {
    let (bench, task, effects) = (bench(), task("resolved"), Effects::default());
    cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
    let play = async |effects: Effects| {
        attempt(&bench, &task, |context| async move {
            let mail: String = context
                .step("mail", Effect::Unrepeatable, async |step| {
                    Ok({
                        effects.note("mail", &step);
                        String::new()
                    })
                })
                .await?;
            context.step("invoice", Effect::Keyed, async |step| effects.did("invoice", &step)).await?;
            Ok(mail)
        })
        .await
    };
    parked(play(effects.clone()).await);
    let said = Output::kept("application/json", r#""message-17""#);
    bench.ledger.resolve_step_done(&task.key, EVA, Some("mail"), Some(said)).await.unwrap();
    assert_eq!(play(effects.clone()).await.into_value(), Some("message-17".to_owned()));
    assert_eq!(effects.names(), ["invoice"]);
}

#[tokio::test]
async fn a_step_resolved_without_its_value_parks_where_the_code_needs_one() {
    let bench = bench();
    for (id, needs) in [("needs a value", true), ("needs none", false)] {
        let task = task(id);
        cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
        parked(
            attempt(&bench, &task, |context| async move {
                context.step::<(), _>("mail", Effect::Unrepeatable, async |_| Ok(())).await
            })
            .await,
        );
        bench.ledger.resolve_step_done(&task.key, EVA, None, None).await.unwrap();
        let outcome = attempt(&bench, &task, |context| async move {
            if needs {
                context.step::<u64, _>("mail", Effect::Unrepeatable, async |_| Ok(1)).await.map(drop)
            } else {
                context.step::<(), _>("mail", Effect::Unrepeatable, async |_| Ok(())).await
            }
        })
        .await;
        if needs {
            shows(&parked(outcome), &["it was resolved without an output, and the code needs one"]);
        } else {
            assert!(matches!(outcome, Outcome::Ran { .. }), "{outcome:?}");
        }
    }
}

#[tokio::test]
async fn a_person_says_that_nothing_happened_and_the_step_runs() {
    let (bench, task, effects) = (bench(), task("not done"), Effects::default());
    let play = async |effects: Effects| {
        attempt(&bench, &task, |context| async move {
            context.step("mail", Effect::Unrepeatable, async |step| effects.did("mail", &step)).await
        })
        .await
    };
    cut_off_inside(&bench, &task, "mail", Effect::Unrepeatable).await;
    parked(play(effects.clone()).await);
    bench.ledger.redrive(&task.key, EVA).await.unwrap();
    parked(play(effects.clone()).await);
    assert_eq!(effects.names(), [""; 0], "a redrive says nothing about the step");
    bench.ledger.resolve_not_done(&task.key, EVA).await.unwrap();
    assert!(matches!(play(effects.clone()).await, Outcome::Ran { .. }));
    assert_eq!(effects.names(), ["mail"]);
}

/// During a rolling upgrade an older worker must go on reading what has no steps.
#[tokio::test]
async fn a_record_without_steps_keeps_the_format_that_older_workers_read() {
    let bench = bench();
    let (plain, stepped) = (task("plain"), task("stepped"));
    attempt(&bench, &plain, |_| async { Ok(()) }).await.into_value().unwrap();
    let run =
        attempt(&bench, &stepped, |context| async move { context.step("a", Effect::Keyed, async |_| Ok(())).await });
    run.await.into_value().unwrap();
    let format = async |task: &Task| codec::encode(&*record(&bench, task).await)[0];
    assert_eq!((format(&plain).await, format(&stepped).await), (1, 2));
    assert_eq!(state(&bench, &stepped).await, Some(State::Done));
}
