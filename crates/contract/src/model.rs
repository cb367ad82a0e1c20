//! The protocol of one task in a few lines, written apart from the code that it checks: no records, tokens or stores.
//!
//! A claim is a number. Its holder may be slow, dead or cut off: the model knows only what reached the task, and in
//! which order. Random histories are played on it and on a ledger over a store, and must agree.

use std::time::Duration;

/// Names a claim call.
pub type ClaimNumber = usize;

/// How tasks are treated.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whether a claim that ends in doubt parks the task.
    pub unrepeatable: bool,
    /// The most attempts.
    pub attempts_max: u32,
    /// The most claims that may end by a passed lease.
    pub crashes_max: u32,
    /// How long a claim holds.
    pub lease: Duration,
    /// How long a task waits after its first failed attempt; twice as long after each further one.
    pub delay_first: Duration,
    /// The longest wait.
    pub delay_max: Duration,
    /// How long final tasks are remembered.
    pub retention: Duration,
}

/// Where a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nobody has claimed it, or nothing is remembered.
    Absent,
    /// Claimed.
    Running,
    /// Failed or given back.
    Waiting,
    /// It took effect.
    Done,
    /// Failed for good.
    Dead,
    /// In doubt.
    Parked,
}

/// What a claim is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Run it.
    Run,
    /// It is done, with this output.
    Replay(Option<u8>),
    /// Another holds it.
    Busy,
    /// Its delay has not passed.
    Waiting,
    /// It failed for good.
    Dead,
    /// It is in doubt.
    Parked,
    /// It is another payload's.
    Mismatch,
    /// Nobody knows: the answer was lost, or the call did not arrive.
    Unknown,
}

/// How the holder of a claim ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It took effect, with an output.
    Complete(u8),
    /// It failed, and may be tried again; whether it took effect is in doubt.
    Fail,
    /// It failed, and nothing happened.
    FailHarmlessly,
    /// It failed for good; whether it took effect is in doubt.
    FailForGood,
    /// It was not begun.
    Release,
}

/// What is recorded of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPart {
    /// It begins, and must not be repeated.
    Begins,
    /// It took effect.
    Ends,
}

/// A call of the store that goes wrong: which of the calls of one question, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disturbed {
    /// The call, from 0.
    pub call: usize,
    /// Whether the store did what it was asked before the answer was lost.
    pub arrives: bool,
}

/// One task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Where it stands.
    pub standing: Standing,
    /// Attempts counted.
    pub attempts: u32,
    /// Crashes counted.
    pub crashes: u32,
    /// Lines of history.
    pub lines: u32,
    /// The payload that it is about.
    pub payload: u8,
    /// The output, once done.
    pub output: Option<u8>,
    /// Steps that ended.
    pub steps: u32,
    /// Whether a step began that must not be repeated, and has not ended.
    pub in_step: bool,
    holder: Option<ClaimNumber>,
    ended_by: Option<ClaimNumber>,
    since: Duration,
    wait: Duration,
}

impl Task {
    /// A task that nobody has claimed.
    #[must_use]
    pub fn new() -> Task {
        Task {
            standing: Standing::Absent,
            attempts: 0,
            crashes: 0,
            lines: 0,
            payload: 0,
            output: None,
            steps: 0,
            in_step: false,
            holder: None,
            ended_by: None,
            since: Duration::ZERO,
            wait: Duration::ZERO,
        }
    }

    /// Time passes.
    pub fn pass(&mut self, time: Duration) {
        self.since += time;
    }

    /// A claim call. One that is disturbed may have changed the task all the same.
    pub fn claim(&mut self, claim: ClaimNumber, payload: u8, rules: &Rules, disturbed: Option<Disturbed>) -> Answer {
        let first = disturbed.filter(|disturbed| disturbed.call == 0);
        if self.standing == Standing::Absent {
            if first.is_none_or(|disturbed| disturbed.arrives) {
                *self = Task { payload, ..Task::new() };
                self.start(claim);
            }
            return if first.is_some() { Answer::Unknown } else { Answer::Run };
        }
        // The first call only shows what is there.
        if first.is_some() {
            return Answer::Unknown;
        }
        let second = disturbed.filter(|disturbed| disturbed.call == 1);
        let arrives = second.is_none_or(|disturbed| disturbed.arrives);
        if payload != self.payload {
            return Answer::Mismatch;
        }
        match self.standing {
            Standing::Running if self.since < rules.lease => return Answer::Busy,
            Standing::Waiting if self.since < self.wait => return Answer::Waiting,
            Standing::Parked => return Answer::Parked,
            Standing::Done | Standing::Dead => {
                if self.since * 2 > rules.retention && arrives {
                    self.since = Duration::ZERO;
                }
                return if self.standing == Standing::Done { Answer::Replay(self.output) } else { Answer::Dead };
            }
            Standing::Absent | Standing::Running | Standing::Waiting => {}
        }
        let mut next = self.clone();
        let answer =
            if self.standing == Standing::Running { next.crash(claim, rules) } else { next.retry(claim, rules) };
        if arrives {
            *self = next;
        }
        if second.is_some() { Answer::Unknown } else { answer }
    }

    fn start(&mut self, claim: ClaimNumber) {
        self.standing = Standing::Running;
        self.attempts += 1;
        self.holder = Some(claim);
        self.ended_by = None;
        self.since = Duration::ZERO;
    }

    fn stop(&mut self, standing: Standing, ended_by: Option<ClaimNumber>) {
        self.standing = standing;
        self.holder = None;
        self.ended_by = ended_by;
        self.since = Duration::ZERO;
        self.wait = Duration::ZERO;
    }

    fn retry(&mut self, claim: ClaimNumber, rules: &Rules) -> Answer {
        if self.attempts >= rules.attempts_max {
            return self.give_up();
        }
        self.start(claim);
        Answer::Run
    }

    /// No attempt is left: a person has to look where a step is in doubt.
    fn give_up(&mut self) -> Answer {
        let (standing, answer) =
            if self.in_step { (Standing::Parked, Answer::Parked) } else { (Standing::Dead, Answer::Dead) };
        self.stop(standing, None);
        answer
    }

    fn crash(&mut self, claim: ClaimNumber, rules: &Rules) -> Answer {
        self.crashes += 1;
        self.lines += 1;
        if rules.unrepeatable || self.crashes >= rules.crashes_max {
            self.stop(Standing::Parked, None);
            return Answer::Parked;
        }
        self.retry(claim, rules)
    }

    /// Whether a claim holds the task, its lease passed or not.
    #[must_use]
    pub fn is_held_by(&self, claim: ClaimNumber) -> bool {
        self.holder == Some(claim)
    }

    /// A heartbeat of a claim. Says whether it still holds.
    pub fn heartbeat(&mut self, claim: ClaimNumber) -> bool {
        let holds = self.is_held_by(claim);
        if holds {
            self.since = Duration::ZERO;
        }
        holds
    }

    /// A step of a claim's begins or ends. Says whether the claim still holds.
    pub fn step(&mut self, claim: ClaimNumber, part: StepPart) -> bool {
        let holds = self.heartbeat(claim);
        if holds {
            self.in_step = part == StepPart::Begins;
            self.steps += u32::from(part == StepPart::Ends);
        }
        holds
    }

    /// The end of a claim, or the same end again. `None`: it is refused.
    pub fn end(&mut self, claim: ClaimNumber, end: End, rules: &Rules) -> Option<Standing> {
        if self.ended_by == Some(claim) {
            return Some(self.standing);
        }
        if self.holder != Some(claim) {
            return None;
        }
        let mut wait = Duration::ZERO;
        let standing = match end {
            End::Complete(output) => {
                self.output = Some(output);
                Standing::Done
            }
            End::Release => {
                self.attempts -= 1;
                Standing::Waiting
            }
            End::Fail | End::FailHarmlessly | End::FailForGood => {
                self.lines += 1;
                if rules.unrepeatable && end != End::FailHarmlessly {
                    Standing::Parked
                } else if end == End::FailForGood || self.attempts >= rules.attempts_max {
                    if self.in_step { Standing::Parked } else { Standing::Dead }
                } else {
                    let doubled = 2_u32.saturating_pow(self.attempts - 1);
                    wait = rules.delay_first.saturating_mul(doubled).min(rules.delay_max);
                    Standing::Waiting
                }
            }
        };
        self.stop(standing, Some(claim));
        self.wait = wait;
        Some(standing)
    }

    /// A claim of which nobody knows whether it arrived is given back.
    pub fn give_back(&mut self, claim: ClaimNumber, rules: &Rules) {
        if self.holder == Some(claim) {
            let _standing = self.end(claim, End::Release, rules);
            self.ended_by = None;
        }
    }

    /// A person returns it to work. Says whether that was possible.
    pub fn redrive(&mut self, rules: &Rules) -> bool {
        let possible = match self.standing {
            Standing::Dead | Standing::Parked | Standing::Waiting => true,
            Standing::Running => self.since >= rules.lease,
            Standing::Absent | Standing::Done => false,
        };
        if possible && self.standing == Standing::Running {
            self.crashes += 1;
            self.lines += 1;
            if rules.unrepeatable {
                self.stop(Standing::Parked, None);
                return true;
            }
        }
        if possible {
            self.begin_again();
        }
        possible
    }

    /// A person says what became of it. Says whether that was possible.
    pub fn resolve(&mut self, outcome: Standing) -> bool {
        let possible = self.standing == Standing::Parked;
        if possible && outcome == Standing::Done {
            self.lines += 1;
            self.output = None;
            self.stop(Standing::Done, None);
        } else if possible {
            self.in_step = false;
            self.begin_again();
        }
        possible
    }

    /// A person says of the step in doubt that it took effect. Says whether that was possible.
    pub fn resolve_step(&mut self) -> bool {
        let possible = self.standing == Standing::Parked && self.in_step;
        if possible {
            self.steps += 1;
            self.in_step = false;
            self.begin_again();
        }
        possible
    }

    fn begin_again(&mut self) {
        self.lines += 1;
        self.attempts = 0;
        self.crashes = 0;
        self.stop(Standing::Waiting, None);
    }

    /// A person removes what is remembered. Says whether there was anything.
    pub fn clear(&mut self) -> bool {
        let there = self.standing != Standing::Absent;
        *self = Task::new();
        there
    }

    /// Whether it is final; only then may it be forgotten.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self.standing, Standing::Done | Standing::Dead)
    }

    /// Whether a purge removes it.
    #[must_use]
    pub fn is_past_retention(&self, rules: &Rules) -> bool {
        self.is_final() && self.since >= rules.retention
    }

    /// What is past its retention is removed.
    pub fn purge(&mut self, rules: &Rules) {
        if self.is_past_retention(rules) {
            *self = Task::new();
        }
    }
}

impl Default for Task {
    fn default() -> Task {
        Task::new()
    }
}
