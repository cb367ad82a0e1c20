//! A command that lives on, and is told its tasks by lines: a line of JSON in, a line of JSON out, one task at a time.
//!
//! As many processes live as tasks of the handler have run at once, which its routes bound.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use taskonce::routes::CommandRules;
use taskonce::source::Delivery;
use taskonce::{Context, Failure, Output};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::time::Instant;

use super::child::{Child, Crew, End, Telling};
use super::facts::Facts;
use super::process::{Guard, order};
use super::streams::Errors;
use super::verdict::{self, GRACE, Told, Word};
use crate::run::{base64, signals};

/// The longest line of an answer: outputs up to 8 MiB, or the route's `output_max`, in JSON.
const LINE_MIN: usize = 16 * 1024 * 1024;
/// How long a process may live on that has closed its stdout.
const CLOSED_MAX: Duration = Duration::from_secs(1);
/// The pause before a process is started after one has failed; it doubles.
const AGAIN_MIN: Duration = Duration::from_millis(100);
/// The longest such pause.
const AGAIN_MAX: Duration = Duration::from_secs(10);

/// A handler that is a pool of processes.
pub(crate) struct Pool {
    crew: Arc<Crew>,
    rules: Arc<CommandRules>,
    handler: String,
    idle: Mutex<Vec<Hand>>,
    trouble: Mutex<Trouble>,
}

/// What keeps a pool from starting processes again and again that fail.
#[derive(Default)]
struct Trouble {
    in_a_row: u32,
    not_before: Option<Instant>,
}

/// One process of a pool.
struct Hand {
    child: Child,
    stdin: pipe::Sender,
    stdout: BufReader<pipe::Receiver>,
    errors: Arc<Errors>,
    /// Of the last task.
    id: u64,
}

/// Why there is no answer.
enum Broken {
    /// Its process has ended.
    Ended(End),
    /// What it said is no answer.
    Protocol(String),
}

#[derive(Serialize)]
struct Request<'a> {
    id: u64,
    #[serde(flatten)]
    facts: &'a Facts,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer<'a> {
    id: u64,
    outcome: Word,
    #[serde(borrow, default, deserialize_with = "also_null")]
    output: Option<&'a RawValue>,
    content_type: Option<String>,
    #[serde(default)]
    message: String,
    retry_after: Option<String>,
    #[serde(default)]
    nothing_happened: bool,
}

/// `null` is an output like any other.
fn also_null<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub(crate) fn new(crew: Arc<Crew>, rules: Arc<CommandRules>, handler: &str) -> Pool {
        Pool { crew, rules, handler: handler.to_owned(), idle: Mutex::default(), trouble: Mutex::default() }
    }

    /// Runs one task in a process that is free, or a new one.
    pub(crate) async fn run(&self, context: Context, delivery: Delivery) -> Result<Output, Failure> {
        let facts = Facts::of(&context, &delivery);
        self.crew.settled(&facts.key).await;
        let mut hand = self.hand().await?;
        hand.id += 1;
        hand.errors.begin(facts.key.clone());
        let guard = Guard::new(&self.crew, facts.key.clone(), &hand.child, self.rules.kill_after);
        let output_max = context.held().policy().output_max;
        let request = request(hand.id, &facts, &delivery.envelope.payload);
        let answered = hand.ask(&request, LINE_MIN.max(output_max.saturating_mul(2))).await;
        guard.release();
        hand.errors.tell_hidden();
        let answered = answered.and_then(|line| Ok((read(&line, hand.id).map_err(Broken::Protocol)?, line.len())));
        match answered {
            Ok((answer, _)) => {
                self.give_back(hand);
                answer
            }
            Err(Broken::Ended(end)) => {
                self.failed();
                let how = match end {
                    End::Exited(code) => format!("its process ended with exit code {code}"),
                    End::Killed(signal) => format!("its process was ended by {}", signals::name(signal)),
                };
                Err(Failure::retryable(match hand.errors.last() {
                    Some(line) => format!("{how}: {line}"),
                    None => how,
                }))
            }
            Err(Broken::Protocol(why)) => {
                self.failed();
                tracing::error!(handler = self.handler, pid = hand.child.number(), "a process is killed: {why}");
                hand.child.kill();
                Err(Failure::retryable(format!("its process broke the protocol: {why}")))
            }
        }
    }

    async fn hand(&self) -> Result<Hand, Failure> {
        loop {
            let Some(mut hand) = locked(&self.idle).pop() else { break };
            if hand.child.has_ended().is_some() {
                tracing::warn!(handler = self.handler, pid = hand.child.number(), "an idle process has ended");
                continue;
            }
            // What it says without being asked would be taken for an answer.
            match tokio::time::timeout(Duration::ZERO, hand.stdout.fill_buf()).await {
                Err(_nothing) => return Ok(hand),
                Ok(_) => {
                    tracing::error!(
                        handler = self.handler,
                        pid = hand.child.number(),
                        "an idle process is killed: it spoke without being asked, or closed its stdout"
                    );
                    hand.child.kill();
                }
            }
        }
        let not_before = locked(&self.trouble).not_before;
        if let Some(moment) = not_before {
            // sleeps: what fails again and again is not started at once again
            tokio::time::sleep_until(moment).await;
        }
        let variables = vec![("TASKONCE_HANDLER".to_owned(), self.handler.clone())];
        let started = self.crew.start(order(&self.rules, variables, Telling::Lines)).await;
        let (child, streams) = started.map_err(|error| {
            self.failed();
            verdict::not_started(&self.rules.command[0], &error)
        })?;
        let errors = Errors::new(self.handler.clone());
        let (told, of) = (Arc::clone(&errors), child.clone());
        self.crew.spawn(async move { told.read(streams.stderr, &of).await });
        Ok(Hand { child, stdin: streams.stdin, stdout: BufReader::new(streams.stdout), errors, id: 0 })
    }

    fn failed(&self) {
        let mut trouble = locked(&self.trouble);
        let pause = AGAIN_MIN.saturating_mul(1 << trouble.in_a_row.min(16)).min(AGAIN_MAX);
        trouble.in_a_row = trouble.in_a_row.saturating_add(1);
        trouble.not_before = Some(Instant::now() + pause);
    }

    /// Its task is over: it waits for the next, or goes when it has had enough.
    fn give_back(&self, hand: Hand) {
        *locked(&self.trouble) = Trouble::default();
        if self.rules.tasks_max.is_some_and(|max| hand.id >= u64::from(max)) {
            return self.dismiss(hand);
        }
        locked(&self.idle).push(hand);
    }

    /// Closes its stdin: it ends by itself then.
    fn dismiss(&self, hand: Hand) {
        let Hand { child, stdin, stdout, .. } = hand;
        drop(stdin);
        self.crew.dismiss(child.clone(), self.rules.kill_after);
        // What it says at its end must not block it.
        self.crew.spawn(async move {
            let _rest = super::streams::read(stdout.into_inner(), 0, &child).await;
        });
    }

    /// No further task comes.
    pub(crate) fn close(&self) {
        let idle = std::mem::take(&mut *locked(&self.idle));
        idle.into_iter().for_each(|hand| self.dismiss(hand));
    }
}

impl Hand {
    /// Tells it the task, and waits for a line. Both at once: either may be longer than a pipe.
    async fn ask(&mut self, request: &[u8], line_max: usize) -> Result<Vec<u8>, Broken> {
        let Hand { child, stdin, stdout, .. } = self;
        let write = async {
            tokio::select! {
                _closed = stdin.write_all(request) => {}
                _end = child.wait() => {}
            }
        };
        let ((), line) = tokio::join!(write, line(stdout, child, line_max));
        match line {
            Ok(Some(line)) => Ok(line),
            Ok(None) => match tokio::time::timeout(CLOSED_MAX, child.wait()).await {
                Ok(end) => Err(Broken::Ended(end)),
                Err(_) => Err(Broken::Protocol("it closed its stdout and lives on".to_owned())),
            },
            Err(why) => Err(Broken::Protocol(why)),
        }
    }
}

/// A line; `None` at the end of the stream.
async fn line(from: &mut BufReader<pipe::Receiver>, child: &Child, max: usize) -> Result<Option<Vec<u8>>, String> {
    let mut line = Vec::new();
    loop {
        let read = tokio::select! {
            biased;
            read = from.fill_buf() => read,
            () = async {
                child.wait().await;
                // sleeps: a process that left the group may hold the stream open
                tokio::time::sleep(GRACE).await;
            } => return Ok(None),
        };
        let bytes = match read {
            Ok(bytes) if !bytes.is_empty() => bytes,
            Ok(_) | Err(_) => return Ok(None),
        };
        let (taken, is_whole) = match bytes.iter().position(|byte| *byte == b'\n') {
            Some(end) => (end, true),
            None => (bytes.len(), false),
        };
        line.extend_from_slice(&bytes[..taken]);
        from.consume(taken + usize::from(is_whole));
        if line.len() > max {
            return Err(format!("its answer is longer than {} MiB", max / 1024 / 1024));
        }
        if is_whole {
            return Ok(Some(line));
        }
    }
}

/// The line that tells a task.
fn request(id: u64, facts: &Facts, payload: &[u8]) -> Vec<u8> {
    // A line end in JSON stands between its tokens only, where a space means the same.
    let one_line = std::str::from_utf8(payload).ok().map(|text| text.replace(['\n', '\r'], " "));
    let json: Option<Box<RawValue>> = one_line.and_then(|text| serde_json::from_str(&text).ok());
    let payload_base64 = if json.is_some() { None } else { Some(base64(payload)) };
    let request = Request { id, facts, payload: json.as_deref(), payload_base64 };
    let mut line = serde_json::to_vec(&request).expect("texts, numbers and JSON have a JSON form");
    line.push(b'\n');
    line
}

/// Reads an answer: the task's result, or why it is no answer.
fn read(line: &[u8], id: u64) -> Result<Result<Output, Failure>, String> {
    let answer: Answer<'_> = serde_json::from_slice(line).map_err(|error| {
        format!("a line that is no answer: column {} (logs go to stderr, answers to stdout)", error.column())
    })?;
    if answer.id != id {
        return Err(format!("an answer with id {} to the task with id {id}", answer.id));
    }
    let told = Told::new(answer.outcome, answer.message, answer.retry_after, answer.nothing_happened)?;
    if let Some(failure) = told.failure() {
        return Ok(Err(failure));
    }
    Ok(Ok(match (answer.output, answer.content_type) {
        (None, _) => Output::Nothing,
        (Some(value), None) => Output::kept("application/json", value.get()),
        (Some(value), Some(content_type)) => match serde_json::from_str::<String>(value.get()) {
            Ok(text) => Output::kept(content_type, text),
            Err(_) => Output::kept(content_type, value.get()),
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_for_its_task_and_says_what_became_of_it() {
        assert_eq!(read(br#"{"id":1,"outcome":"done"}"#, 1), Ok(Ok(Output::Nothing)));
        let value = Output::kept("application/json", "12345678901234567890123");
        assert_eq!(read(br#"{"id":1,"outcome":"done","output":12345678901234567890123}"#, 1), Ok(Ok(value)));
        let null = Output::kept("application/json", "null");
        assert_eq!(read(br#"{"id":1,"outcome":"done","output":null}"#, 1), Ok(Ok(null)));
        let text = Output::kept("text/csv", "a,b");
        assert_eq!(read(br#"{"id":1,"outcome":"done","output":"a,b","content_type":"text/csv"}"#, 1), Ok(Ok(text)));
        let failed = read(br#"{"id":1,"outcome":"permanent","message":"no such card"}"#, 1).unwrap().unwrap_err();
        assert_eq!(failed.message, "no such card");
        for bad in ["", "hello", "{}", r#"{"id":1}"#, r#"{"id":2,"outcome":"done"}"#, r#"{"id":1,"outcome":"well"}"#] {
            assert!(read(bad.as_bytes(), 1).is_err(), "{bad}");
        }
    }
}
