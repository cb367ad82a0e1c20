//! Plays a story through ledgers over a store, in virtual time.

use std::collections::HashMap;
use std::time::Duration;

use taskonce_core::decide::By;
use taskonce_core::held::{Renewal, Settled};
use taskonce_core::ledger::{Admission, Claim, Unsettled};
use taskonce_core::policy::{Backoff, Policy};
use taskonce_core::record::{Failure, FailureClass, Found, Output, Record, State};
use taskonce_core::store::Filter;

use super::{Step, Trace};
use crate::cases::word;
use crate::faulty::Fault;
use crate::host::Delays;
use crate::stage::{Actor, Stage};

/// A second of a story is so many of the store's, so that no story depends on how fast it is played.
const SCALE: u32 = 60;
/// The key and payload of a step that names none.
const KEY: &str = "task";
const PAYLOAD: u8 = 1;

/// Plays a story, and stops at the first answer that is not the expected one.
///
/// # Errors
/// Which line was answered otherwise, and how.
pub async fn play(trace: &Trace, stage: &Stage) -> Result<(), String> {
    let mut player = Player {
        stage,
        policy: slow(&trace.policy),
        now: Duration::ZERO,
        actors: HashMap::new(),
        claims: HashMap::new(),
        open: HashMap::new(),
        dead: Vec::new(),
    };
    for step in &trace.steps {
        stage.pass((step.at - player.now) * SCALE).await;
        player.now = step.at;
        let told = format!("line {}: `{} {}` at {:?}", step.line, step.actor, step.verb, step.at);
        let answered = player.step(step).await.map_err(|message| format!("{told}: {message}"))?;
        if answered.word != step.answer {
            return Err(format!("{told} is answered `{}`, not `{}`", answered.word, step.answer));
        }
        for (name, wanted) in &step.facts {
            let is = answered.fact(name).map_err(|message| format!("{told}: {message}"))?;
            if &is != wanted {
                return Err(format!("{told}: {name} is `{is}`, not `{wanted}`"));
            }
        }
    }
    Ok(())
}

fn slow(policy: &Policy) -> Policy {
    let backoff = Backoff {
        delay_min: policy.backoff.delay_min * SCALE,
        delay_max: policy.backoff.delay_max * SCALE,
        ..policy.backoff
    };
    Policy {
        lease: policy.lease * SCALE,
        backoff,
        retention: policy.retention * SCALE,
        output_retention: policy.output_retention * SCALE,
        ..policy.clone()
    }
}

struct Player<'a> {
    stage: &'a Stage,
    policy: Policy,
    now: Duration,
    actors: HashMap<String, Actor>,
    claims: HashMap<(String, String), Claim>,
    open: HashMap<(String, String), Unsettled>,
    /// Processes that died, with all that they held. They are kept so that nothing of theirs is cleaned up.
    dead: Vec<(Actor, Vec<Claim>, Vec<Unsettled>)>,
}

struct Answered {
    word: String,
    record: Option<Found>,
}

impl Answered {
    fn word(word: impl Into<String>) -> Answered {
        Answered { word: word.into(), record: None }
    }

    fn fact(&self, name: &str) -> Result<String, String> {
        let found = self.record.as_ref().ok_or_else(|| format!("this answer has no `{name}`"))?;
        let record = &*found.record;
        Ok(match name {
            "attempt" => record.attempt.to_string(),
            "crashes" => record.crashes.to_string(),
            "owner" => record.owner.to_string(),
            "history" => record.history.len().to_string(),
            "class" => record.failure.as_ref().map_or("none", |failure| failure.class.name()).into(),
            "output" => match &record.output {
                Output::Nothing => "nothing".into(),
                Output::Kept { bytes, .. } => String::from_utf8_lossy(bytes).into_owned(),
                Output::Dropped(_) => "dropped".into(),
            },
            "left" => {
                let left = if record.state == State::Running { found.lease_left() } else { found.delay_left() };
                format!("{}s", left.as_millis().div_ceil(1000 * u128::from(SCALE)))
            }
            _ => return Err(format!("there is no fact `{name}`")),
        })
    }
}

impl Player<'_> {
    async fn step(&mut self, step: &Step) -> Result<Answered, String> {
        if !self.actors.contains_key(&step.actor) {
            self.actors.insert(step.actor.clone(), self.stage.actor_with(&step.actor, Delays::Full));
        }
        let actor = &self.actors[&step.actor];
        let argument = |name: &str| step.arguments.iter().find(|(is, _)| is == name).map(|(_, value)| value.as_str());
        let key = argument("key").unwrap_or(KEY);
        let mine = (step.actor.clone(), key.to_owned());
        let task = self.stage.task_with(key, argument("payload").map_or(Ok(PAYLOAD), number)?);
        let key = &task.key;
        actor.store.plan(match argument("fault") {
            None => None,
            Some("before") => Some(Fault::Before),
            Some("after") => Some(Fault::After),
            Some(other) => return Err(format!("there is no fault `{other}`; there are before, after")),
        });
        let by = By { who: &step.actor, why: "the story says so" };
        let no_claim = || format!("{} holds no claim of `{}`", step.actor, mine.1);
        match step.verb.as_str() {
            "claim" => {
                let Ok(admission) = actor.ledger.claim(&task, &self.policy).await else {
                    return Ok(Answered::word("unknown"));
                };
                let word = word(&admission).to_owned();
                let record = match admission {
                    Admission::Run(claim) => {
                        self.claims.insert(mine, claim);
                        self.load(key).await?
                    }
                    Admission::Replay(seen)
                    | Admission::Busy(seen)
                    | Admission::Waiting(seen)
                    | Admission::Dead(seen)
                    | Admission::Parked(seen)
                    | Admission::Mismatch { seen, .. } => Some(seen.found),
                };
                Ok(Answered { word, record })
            }
            "enter" => {
                self.claims.get(&mine).ok_or_else(no_claim)?.enter();
                Ok(Answered::word("ok"))
            }
            "heartbeat" => {
                let renewal = self.claims.get(&mine).ok_or_else(no_claim)?.heartbeat().await;
                Ok(Answered::word(match renewal {
                    Ok(Renewal::Held) => "ok",
                    Ok(Renewal::Lost) => "lost",
                    Ok(Renewal::Over) => "over",
                    Err(_) => "unknown",
                }))
            }
            "complete" => {
                let output = argument("output").map_or(Output::Nothing, |text| Output::kept("text/plain", text));
                let claim = self.claims.remove(&mine).ok_or_else(no_claim)?;
                let settled = claim.complete(output).await;
                Ok(self.settled(mine, settled))
            }
            "fail" => {
                let class = argument("class").unwrap_or("retryable");
                let class = FailureClass::ALL.into_iter().find(|is| is.name() == class);
                let mut failure = Failure::new(class.ok_or("there is no such class of failures")?, "as the story says");
                match argument("aftermath") {
                    None | Some("in_doubt") => {}
                    Some("nothing_happened") => failure = failure.nothing_happened(),
                    Some(other) => return Err(format!("there is no aftermath `{other}`")),
                }
                let claim = self.claims.remove(&mine).ok_or_else(no_claim)?;
                let settled = claim.fail(failure).await;
                Ok(self.settled(mine, settled))
            }
            "release" => {
                let claim = self.claims.remove(&mine).ok_or_else(no_claim)?;
                let settled = claim.release().await;
                Ok(self.settled(mine, settled))
            }
            "again" => {
                let open = self.open.remove(&mine).ok_or("there is no end whose outcome is unknown")?;
                let settled = open.again().await;
                Ok(self.settled(mine, settled))
            }
            "drop" => {
                let (claim, open) = (self.claims.remove(&mine), self.open.remove(&mine));
                if claim.is_none() && open.is_none() {
                    return Err(no_claim());
                }
                Ok(Answered::word("ok"))
            }
            "work" => {
                let worked = actor.keeper.work(&*actor.store, &*actor.host).await;
                worked.map(|_| Answered::word("ok")).map_err(|error| error.to_string())
            }
            "die" => {
                let claims = extract(&mut self.claims, &step.actor);
                let open = extract(&mut self.open, &step.actor);
                let actor = self.actors.remove(&step.actor).ok_or("nobody dies twice")?;
                self.dead.push((actor, claims, open));
                Ok(Answered::word("ok"))
            }
            "redrive" => Ok(changed(actor.ledger.redrive(key, by).await)),
            "resolve-done" => Ok(changed(actor.ledger.resolve_done(key, by, None).await)),
            "resolve-not-done" => Ok(changed(actor.ledger.resolve_not_done(key, by).await)),
            "clear" => Ok(match actor.ledger.clear(key, by).await {
                Ok(record) => Answered { word: "ok".into(), record },
                Err(error) => Answered::word(error.kind().name()),
            }),
            "purge" => {
                let purged = actor.ledger.purge(&Filter::default()).await;
                purged.map(|_| Answered::word("ok")).map_err(|error| error.to_string())
            }
            "show" => {
                let found = self.load(key).await?;
                let word = found.as_ref().map_or("absent", |found| found.record.state.name()).to_owned();
                Ok(Answered { word, record: found })
            }
            other => Err(format!("there is no verb `{other}`")),
        }
    }

    async fn load(&self, key: &taskonce_core::key::Key) -> Result<Option<Found>, String> {
        self.stage.store().load(key).await.map_err(|error| error.to_string())
    }

    fn settled(&mut self, mine: (String, String), settled: Result<Settled, Unsettled>) -> Answered {
        match settled {
            Ok(Settled::Recorded(record)) => {
                let word = if record.state == State::Done { "ok" } else { record.state.name() };
                Answered { word: word.into(), record: Some(now(record)) }
            }
            Ok(Settled::Lost(found)) => Answered { word: "lost".into(), record: found },
            Err(open) => {
                self.open.insert(mine, open);
                Answered::word("unknown")
            }
        }
    }
}

fn changed(changed: taskonce_core::Result<std::sync::Arc<Record>>) -> Answered {
    match changed {
        Ok(record) => Answered { word: record.state.name().into(), record: Some(now(record)) },
        Err(error) => Answered::word(error.kind().name()),
    }
}

fn now(record: std::sync::Arc<Record>) -> Found {
    Found { record, age: taskonce_core::record::Age::default() }
}

fn number(text: &str) -> Result<u8, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number up to 255"))
}

fn extract<T>(held: &mut HashMap<(String, String), T>, actor: &str) -> Vec<T> {
    held.extract_if(|(who, _), _| who == actor).map(|(_, value)| value).collect()
}
