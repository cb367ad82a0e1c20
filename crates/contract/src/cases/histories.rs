//! Random histories: several processes, time that passes, lost answers, takeovers, people; each step must agree with the
//! model, and so must what the store then holds. A history that does not is shrunk to a short one.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use taskonce_core::decide::By;
use taskonce_core::held::{Phase, Renewal, Settled};
use taskonce_core::key::Fingerprint;
use taskonce_core::ledger::{Admission, Claim, Unsettled};
use taskonce_core::policy::{Backoff, Effect, Policy};
use taskonce_core::record::{Failure, Output, Record, State};
use taskonce_core::step::{self, StepAsk, StepState};
use taskonce_core::store::Filter;
use taskonce_core::{ErrorKind, Result, key};

use crate::faulty::Fault;
use crate::host::Delays;
use crate::model::{Answer, ClaimNumber, Disturbed, End, Rules, Standing, StepPart, Task};
use crate::stage::{Actor, Stage, minutes};

/// How many histories one case plays, unless the variable `PROPTEST_CASES` says otherwise.
const HISTORIES: u32 = 96;
/// The most steps of a history.
const STEPS_MAX: usize = 40;
/// How often a failed history may be played again to make it shorter.
const SHRINKS_MAX: u32 = 400;
/// The most batches of one purge.
const PURGES_MAX: usize = 100;
const BY: By<'static> = By { who: "eva", why: "random" };
const ACTORS: usize = 3;
const TASKS: usize = 2;
/// Every step of time is in whole minutes, and every threshold half a minute off, so that the time which a slow machine
/// takes decides nothing.
const HALF: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
enum Op {
    Claim {
        actor: usize,
        task: usize,
        payload: u8,
        enter: bool,
        disturbed: Option<Disturbed>,
    },
    Heartbeat {
        claim: Index,
        disturbed: Option<Disturbed>,
    },
    Step {
        claim: Index,
        part: StepPart,
        disturbed: Option<Disturbed>,
    },
    End {
        claim: Index,
        end: End,
        disturbed: Option<Disturbed>,
    },
    Again {
        open: Index,
        disturbed: Option<Disturbed>,
    },
    Drop {
        claim: Index,
    },
    Work {
        actor: usize,
    },
    Pass {
        minutes: u64,
    },
    Redrive {
        task: usize,
    },
    Resolve {
        task: usize,
        outcome: Standing,
    },
    ResolveStep {
        task: usize,
    },
    Clear {
        task: usize,
    },
    /// Makes a final record older by so many tenths of its retention, and purges.
    Grow {
        task: usize,
        tenths: u32,
    },
}

fn op(with_faults: bool) -> impl Strategy<Value = Op> {
    let disturbed = move || {
        let any = (0..2_usize, any::<bool>()).prop_map(|(call, arrives)| Disturbed { call, arrives });
        prop::option::weighted(if with_faults { 0.3 } else { 1e-9 }, any)
            .prop_map(move |disturbed| disturbed.filter(|_| with_faults))
    };
    let end = prop_oneof![
        3 => (0..3_u8).prop_map(End::Complete),
        2 => Just(End::Fail),
        1 => Just(End::FailHarmlessly),
        1 => Just(End::FailForGood),
        1 => Just(End::Release),
    ];
    let payload = prop_oneof![9 => Just(1_u8), 1 => Just(2_u8)];
    let pass = prop_oneof![3 => 1..6_u64, 2 => 10..40_u64];
    prop_oneof![
        10 => (0..ACTORS, 0..TASKS, payload, any::<bool>(), disturbed()).prop_map(
            |(actor, task, payload, enter, disturbed)| Op::Claim { actor, task, payload, enter, disturbed }
        ),
        3 => (any::<Index>(), disturbed()).prop_map(|(claim, disturbed)| Op::Heartbeat { claim, disturbed }),
        4 => (any::<Index>(), prop::sample::select(vec![StepPart::Begins, StepPart::Ends]), disturbed())
            .prop_map(|(claim, part, disturbed)| Op::Step { claim, part, disturbed }),
        7 => (any::<Index>(), end, disturbed()).prop_map(|(claim, end, disturbed)| Op::End { claim, end, disturbed }),
        2 => (any::<Index>(), disturbed()).prop_map(|(open, disturbed)| Op::Again { open, disturbed }),
        2 => any::<Index>().prop_map(|claim| Op::Drop { claim }),
        2 => (0..ACTORS).prop_map(|actor| Op::Work { actor }),
        6 => pass.prop_map(|minutes| Op::Pass { minutes }),
        1 => (0..TASKS).prop_map(|task| Op::Redrive { task }),
        1 => (0..TASKS, prop::sample::select(vec![Standing::Done, Standing::Waiting]))
            .prop_map(|(task, outcome)| Op::Resolve { task, outcome }),
        1 => (0..TASKS).prop_map(|task| Op::ResolveStep { task }),
        1 => (0..TASKS).prop_map(|task| Op::Clear { task }),
        2 => (0..TASKS, 1..12_u32).prop_map(|(task, tenths)| Op::Grow { task, tenths }),
    ]
}

pub(super) async fn random_histories_agree_with_the_model(stage: Stage) {
    check(&stage, rules(false), false);
}

pub(super) async fn random_histories_with_lost_answers_agree_with_the_model(stage: Stage) {
    check(&stage, rules(false), true);
}

pub(super) async fn random_histories_of_unrepeatable_effects_agree_with_the_model(stage: Stage) {
    check(&stage, rules(true), true);
}

fn rules(unrepeatable: bool) -> Rules {
    Rules {
        unrepeatable,
        attempts_max: 3,
        crashes_max: 2,
        lease: minutes(15) + HALF,
        delay_first: minutes(5) + HALF,
        delay_max: minutes(8) + HALF,
        retention: minutes(100_000) + HALF,
    }
}

fn policy(rules: &Rules) -> Policy {
    Policy {
        lease: rules.lease,
        attempts_max: rules.attempts_max,
        crashes_max: rules.crashes_max,
        backoff: Backoff { delay_min: rules.delay_first, delay_max: rules.delay_max, factor: 2.0 },
        retention: rules.retention,
        output_retention: rules.retention,
        store_may_forget: true,
        ..Policy::new(if rules.unrepeatable { Effect::Unrepeatable } else { Effect::Keyed })
    }
}

fn check(stage: &Stage, rules: Rules, with_faults: bool) {
    let default = Config::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { HISTORIES };
    let config = Config { cases, max_shrink_iters: SHRINKS_MAX, failure_persistence: None, ..default };
    let runtime = tokio::runtime::Handle::current();
    let number = AtomicUsize::new(0);
    let outcome = TestRunner::new(config).run(
        &(1..4_u32, 1..4_u32, vec(op(with_faults), 1..STEPS_MAX)),
        |(attempts_max, crashes_max, ops)| {
            let rules = Rules { attempts_max, crashes_max, ..rules.clone() };
            let number = number.fetch_add(1, Ordering::SeqCst);
            tokio::task::block_in_place(|| {
                runtime.block_on(async {
                    let mut history = History::new(stage, rules, number);
                    for (at, op) in ops.iter().enumerate() {
                        let told = format!("step {at}, {op:?}");
                        history.step(op).await.map_err(|fault| TestCaseError::fail(format!("{told}: {fault}")))?;
                    }
                    Ok(())
                })
            })
        },
    );
    if let Err(fault) = outcome {
        panic!("{fault}");
    }
}

/// A claim, or its end, that an actor holds.
struct Holding<T> {
    actor: usize,
    task: usize,
    number: ClaimNumber,
    entered: bool,
    /// Whether the answer to its last heartbeat was lost, so that its next write must learn the token first.
    behind: bool,
    end: End,
    what: T,
}

impl<T> Holding<T> {
    fn with<U>(self, what: impl FnOnce(T) -> U) -> Holding<U> {
        let Holding { actor, task, number, entered, behind, end, what: held } = self;
        Holding { actor, task, number, entered, behind, end, what: what(held) }
    }
}

/// The end of a claim under way.
type Settling = Pin<Box<dyn Future<Output = std::result::Result<Settled, Unsettled>>>>;

struct History<'a> {
    stage: &'a Stage,
    rules: Rules,
    policy: Policy,
    actors: Vec<Actor>,
    keys: Vec<key::Key>,
    tasks: Vec<Task>,
    calls: ClaimNumber,
    claims: Vec<Holding<Claim>>,
    open: Vec<Holding<Unsettled>>,
    /// What each actor's keeper was handed, as the model sees it: ends first, then claims to be given back.
    ends: Vec<(usize, usize, ClaimNumber, End)>,
    unknown: Vec<(usize, usize, ClaimNumber)>,
}

type Checked<T = ()> = std::result::Result<T, String>;

fn agree<T: PartialEq + std::fmt::Debug>(what: &str, is: T, wanted: T) -> Checked {
    if is == wanted { Ok(()) } else { Err(format!("{what} is {is:?}; the model says {wanted:?}")) }
}

impl<'a> History<'a> {
    fn new(stage: &'a Stage, rules: Rules, number: usize) -> History<'a> {
        stage.forget_keys();
        History {
            stage,
            policy: policy(&rules),
            rules,
            actors: (0..ACTORS).map(|actor| stage.actor_with(&format!("actor-{actor}"), Delays::Full)).collect(),
            keys: (0..TASKS).map(|task| stage.key(&format!("history-{number}-{task}"))).collect(),
            tasks: vec![Task::new(); TASKS],
            calls: 0,
            claims: Vec::new(),
            open: Vec::new(),
            ends: Vec::new(),
            unknown: Vec::new(),
        }
    }

    async fn step(&mut self, op: &Op) -> Checked {
        match op.clone() {
            Op::Claim { actor, task, payload, enter, disturbed } => {
                self.claim(actor, task, payload, enter, disturbed).await?;
            }
            Op::Heartbeat { claim, disturbed } => self.write(claim, None, disturbed).await?,
            Op::Step { claim, part, disturbed } => self.write(claim, Some(part), disturbed).await?,
            Op::End { claim, end, disturbed } => self.end(claim, end, disturbed).await?,
            Op::Again { open, disturbed } => {
                if !self.open.is_empty() {
                    let holding = self.open.remove(open.index(self.open.len()));
                    self.settle(holding.with(|open| Box::pin(open.again()) as Settling), disturbed).await?;
                }
            }
            Op::Drop { claim } => {
                if !self.claims.is_empty() {
                    let holding = self.claims.remove(claim.index(self.claims.len()));
                    let end = if holding.entered { End::Fail } else { End::Release };
                    self.ends.push((holding.actor, holding.task, holding.number, end));
                }
            }
            Op::Work { actor } => self.work(actor).await,
            Op::Pass { minutes: count } => {
                self.stage.pass(minutes(count)).await;
                self.tasks.iter_mut().for_each(|task| task.pass(minutes(count)));
                self.purge().await;
            }
            Op::Redrive { task } => {
                let changed = self.actors[0].ledger.redrive(&self.keys[task], BY).await;
                let absent = self.tasks[task].standing == Standing::Absent;
                Self::changed(changed, self.tasks[task].redrive(&self.rules), absent)?;
            }
            Op::Resolve { task, outcome } => {
                let (ledger, key) = (&self.actors[1].ledger, &self.keys[task]);
                let changed = match outcome {
                    Standing::Done => ledger.resolve_done(key, BY, None).await,
                    _ => ledger.resolve_not_done(key, BY).await,
                };
                let absent = self.tasks[task].standing == Standing::Absent;
                Self::changed(changed, self.tasks[task].resolve(outcome), absent)?;
            }
            Op::ResolveStep { task } => {
                let changed = self.actors[1].ledger.resolve_step_done(&self.keys[task], BY, None, None).await;
                let absent = self.tasks[task].standing == Standing::Absent;
                Self::changed(changed, self.tasks[task].resolve_step(), absent)?;
            }
            Op::Clear { task } => {
                let cleared = self.actors[2].ledger.clear(&self.keys[task], BY).await;
                agree("clear", cleared.is_ok(), self.tasks[task].clear())?;
            }
            Op::Grow { task, tenths } => self.grow(task, tenths).await,
        }
        self.actors.iter().for_each(|actor| actor.store.plan([]));
        self.compare().await
    }

    fn plan(&self, actor: usize, disturbed: Option<Disturbed>) {
        let faults = disturbed.map(|disturbed| {
            let fault = if disturbed.arrives { Fault::After } else { Fault::Before };
            std::iter::repeat_n(Fault::None, disturbed.call).chain([fault])
        });
        self.actors[actor].store.plan(faults.into_iter().flatten());
    }

    async fn claim(
        &mut self,
        actor: usize,
        task: usize,
        payload: u8,
        enter: bool,
        disturbed: Option<Disturbed>,
    ) -> Checked {
        self.calls += 1;
        let number = self.calls;
        self.plan(actor, disturbed);
        let asked = self.stage.task_with(self.keys[task].id(), payload);
        let answer = self.actors[actor].ledger.claim(&asked, &self.policy).await;
        let wanted = self.tasks[task].claim(number, payload, &self.rules, disturbed);
        let is = match &answer {
            Ok(Admission::Run(_)) => Answer::Run,
            Ok(Admission::Replay(seen)) => Answer::Replay(output(&seen.found.record)),
            Ok(Admission::Busy(_)) => Answer::Busy,
            Ok(Admission::Waiting(_)) => Answer::Waiting,
            Ok(Admission::Dead(_)) => Answer::Dead,
            Ok(Admission::Parked(_)) => Answer::Parked,
            Ok(Admission::Mismatch { .. }) => Answer::Mismatch,
            Err(_) => Answer::Unknown,
        };
        agree("the answer", is, wanted)?;
        if wanted == Answer::Unknown {
            self.unknown.push((actor, task, number));
        }
        if let Ok(Admission::Run(claim)) = answer {
            agree("the attempt", claim.attempt(), self.tasks[task].attempts)?;
            if enter {
                claim.enter();
            }
            let holding =
                Holding { actor, task, number, entered: enter, behind: false, end: End::Release, what: claim };
            self.claims.push(holding);
        }
        Ok(())
    }

    /// What becomes of the write of a claim: `Some` if its outcome is unknown, and then whether it has arrived.
    fn outcome<T>(&self, holding: &Holding<T>, disturbed: Option<Disturbed>) -> Option<bool> {
        let holds = self.tasks[holding.task].is_held_by(holding.number);
        let writes_at = usize::from(holds && holding.behind);
        let disturbed = disturbed.filter(|disturbed| disturbed.call <= writes_at)?;
        Some(holds && disturbed.arrives && disturbed.call == writes_at)
    }

    /// A write of a claim that goes on: a heartbeat, or one that tells of a step.
    async fn write(&mut self, claim: Index, part: Option<StepPart>, disturbed: Option<Disturbed>) -> Checked {
        if self.claims.is_empty() {
            return Ok(());
        }
        let at = claim.index(self.claims.len());
        let holding = &self.claims[at];
        self.plan(holding.actor, disturbed);
        let knows = holding.what.held().phase() == Phase::Lost;
        let holds = match part {
            None => holding.what.heartbeat().await.map(|renewal| renewal == Renewal::Held),
            Some(part) => {
                let place = self.tasks[holding.task].steps as usize;
                let actor = &self.actors[holding.actor];
                let change = |record: &Record| step_part(record, place, part);
                holding.what.held().advance(&*actor.store, &*actor.host, change).await.map(|stored| stored.is_some())
            }
        };
        let outcome = if knows { None } else { self.outcome(holding, disturbed) };
        let task = &mut self.tasks[holding.task];
        let number = holding.number;
        let mut arrives = || match part {
            None => task.heartbeat(number),
            Some(part) => task.step(number, part),
        };
        match (outcome, holds) {
            (Some(arrived), Err(_)) => {
                if arrived {
                    arrives();
                    self.claims[at].behind = true;
                } else if disturbed.is_some_and(|disturbed| disturbed.call == 1) {
                    self.claims[at].behind = false;
                }
                Ok(())
            }
            (None, Ok(holds)) => {
                let wanted = arrives();
                self.claims[at].behind = false;
                agree("whether the claim holds", holds, wanted)
            }
            (outcome, holds) => Err(format!("the write is {holds:?}; the model says {outcome:?}")),
        }
    }

    async fn end(&mut self, claim: Index, end: End, disturbed: Option<Disturbed>) -> Checked {
        if self.claims.is_empty() {
            return Ok(());
        }
        let mut holding = self.claims.remove(claim.index(self.claims.len()));
        // A handler that was entered cannot be given back: that is a failed attempt.
        holding.end = if end == End::Release && holding.entered { End::Fail } else { end };
        let settling = holding.with(|claim| match end {
            End::Complete(output) => Box::pin(claim.complete(Output::kept("text/plain", [output]))) as Settling,
            End::Fail => Box::pin(claim.fail(Failure::retryable("in doubt"))),
            End::FailHarmlessly => Box::pin(claim.fail(Failure::retryable("nothing").nothing_happened())),
            End::FailForGood => Box::pin(claim.fail(Failure::permanent("for good"))),
            End::Release => Box::pin(claim.release()),
        });
        self.settle(settling, disturbed).await
    }

    async fn settle(&mut self, mut holding: Holding<Settling>, disturbed: Option<Disturbed>) -> Checked {
        self.plan(holding.actor, disturbed);
        let settled = (&mut holding.what).await;
        let outcome = self.outcome(&holding, disturbed);
        let task = &mut self.tasks[holding.task];
        match (outcome, settled) {
            (Some(arrived), Err(open)) => {
                if arrived {
                    task.end(holding.number, holding.end, &self.rules);
                }
                self.open.push(holding.with(|_| open));
                Ok(())
            }
            (None, Ok(settled)) => {
                let is = match &settled {
                    Settled::Recorded(record) => Some(standing(record.state)),
                    Settled::Lost(_) => None,
                };
                agree("the end", is, task.end(holding.number, holding.end, &self.rules))
            }
            (outcome, settled) => Err(format!("the end is {settled:?}; the model says {outcome:?}")),
        }
    }

    async fn work(&mut self, actor: usize) {
        self.plan(actor, None);
        self.actors[actor].work().await;
        for (_, task, number, end) in self.ends.extract_if(.., |entry| entry.0 == actor) {
            self.tasks[task].end(number, end, &self.rules);
        }
        for (_, task, number) in self.unknown.extract_if(.., |entry| entry.0 == actor) {
            self.tasks[task].give_back(number, &self.rules);
        }
    }

    /// What is past its retention must be gone after a purge; a store whose keys expire may be ahead of it.
    async fn purge(&mut self) {
        let due = |task: &Task| task.is_past_retention(&self.rules);
        if !self.tasks.iter().any(due) {
            return;
        }
        for _ in 0..PURGES_MAX {
            let purged = self.stage.store().purge(&Filter::default()).await.unwrap();
            if purged.records == 0 && purged.outputs == 0 {
                break;
            }
        }
        self.tasks.iter_mut().for_each(|task| task.purge(&self.rules));
    }

    async fn grow(&mut self, task: usize, tenths: u32) {
        if self.tasks[task].is_final() {
            let older = minutes(10_000) * tenths;
            self.stage.shift_age(&self.keys[task], older.as_millis() as i64).await;
            self.tasks[task].pass(older);
        }
        self.purge().await;
    }

    fn changed(changed: Result<Arc<Record>>, possible: bool, absent: bool) -> Checked {
        let wanted = if absent { ErrorKind::NotFound } else { ErrorKind::WrongState };
        agree("the change", changed.err().map(|error| error.kind()), (!possible).then_some(wanted))
    }

    /// Compares what the store holds of each task with the model.
    async fn compare(&self) -> Checked {
        for (key, task) in self.keys.iter().zip(&self.tasks) {
            let found = self.stage.store().load(key).await.map_err(|error| error.to_string())?;
            let Some(record) = found.map(|found| found.record) else {
                agree("an absent record", Standing::Absent, task.standing)?;
                continue;
            };
            let lines = record.history.len() as u32 + record.history_dropped;
            let is = (standing(record.state), record.attempt, record.crashes, lines, record.fingerprint.0[0]);
            let wanted = (task.standing, task.attempts, task.crashes, task.lines, task.payload);
            agree("the record (state, attempts, crashes, lines, payload)", is, wanted)?;
            agree("its output", output(&record), task.output)?;
            let ended = record.steps.iter().filter(|step| step.state == StepState::Done).count();
            let began = record.steps.len() - ended;
            agree("its steps (ended, begun)", (ended as u32, began), (task.steps, usize::from(task.in_step)))?;
        }
        Ok(())
    }
}

fn step_part(record: &Record, place: usize, part: StepPart) -> Record {
    let ask = StepAsk { name: format!("step {place}"), effect: Effect::Unrepeatable, input: Fingerprint([0; 16]) };
    match part {
        StepPart::Begins => step::begin(record, place, &ask),
        StepPart::Ends => step::end(record, place, &ask, Output::kept("text/plain", "x"), Duration::ZERO),
    }
}

fn standing(state: State) -> Standing {
    match state {
        State::Running => Standing::Running,
        State::Waiting => Standing::Waiting,
        State::Done => Standing::Done,
        State::Dead => Standing::Dead,
        State::Parked => Standing::Parked,
    }
}

fn output(record: &Record) -> Option<u8> {
    match &record.output {
        Output::Kept { bytes, .. } => bytes.first().copied(),
        Output::Nothing | Output::Dropped(_) => None,
    }
}
