//! A command that is started anew for each task: payload on stdin, output on stdout, and how it ended is what became of it.

use std::sync::Arc;
use std::time::Duration;

use taskonce::routes::CommandRules;
use taskonce::source::Delivery;
use taskonce::{Context, Failure, Output};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;

use super::child::{Child, Crew, Order, Streams, Telling};
use super::facts::Facts;
use super::streams::{self, Errors};
use super::verdict::{self, RESULT_MAX, Told};

/// A handler that is a command, a process a task.
pub(crate) struct Process {
    pub(crate) crew: Arc<Crew>,
    pub(crate) rules: Arc<CommandRules>,
}

/// Cancels the command when it is dropped before its end.
pub(crate) struct Guard {
    crew: Arc<Crew>,
    key: String,
    child: Option<Child>,
    kill_after: Duration,
}

impl Guard {
    pub(crate) fn new(crew: &Arc<Crew>, key: String, child: &Child, kill_after: Duration) -> Guard {
        Guard { crew: Arc::clone(crew), key, child: Some(child.clone()), kill_after }
    }

    /// Its task is over: it is left alone.
    pub(crate) fn release(mut self) {
        self.child = None;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(child) = self.child.take() {
            self.crew.cancel(std::mem::take(&mut self.key), child, self.kill_after);
        }
    }
}

/// The order for a command with these variables beside the ones of its rules.
pub(crate) fn order(rules: &CommandRules, variables: Vec<(String, String)>, result: Telling) -> Order {
    Order {
        command: rules.command.iter().map(Into::into).collect(),
        directory: rules.directory.clone(),
        variables: rules.environment.iter().cloned().chain(variables).collect(),
        result,
    }
}

impl Process {
    /// Runs it for one task.
    pub(crate) async fn run(&self, context: Context, delivery: Delivery) -> Result<Output, Failure> {
        let facts = Facts::of(&context, &delivery);
        self.crew.settled(&facts.key).await;
        let order = order(&self.rules, facts.variables(), Telling::Descriptor);
        let started = self.crew.start(order).await;
        let (child, streams) = started.map_err(|error| verdict::not_started(&self.rules.command[0], &error))?;
        let guard = Guard::new(&self.crew, facts.key.clone(), &child, self.rules.kill_after);
        let Streams { stdin, stdout, stderr, result } = streams;
        let errors = Errors::new(facts.key);
        let output_max = context.held().policy().output_max;
        let told = async {
            match result {
                Some(result) => Some(streams::read(result, RESULT_MAX, &child).await),
                None => None,
            }
        };
        let ((), output, (), told) = tokio::join!(
            feed(stdin, &delivery.envelope.payload, &child),
            streams::read(stdout, output_max, &child),
            errors.read(stderr, &child),
            told,
        );
        let end = child.wait().await;
        guard.release();
        errors.tell_hidden();
        let told = told.filter(|told| told.total > 0).map(|told| {
            if told.total > told.bytes.len() as u64 {
                return Err(format!("it is longer than {} KiB", RESULT_MAX / 1024));
            }
            Told::read(&told.bytes)
        });
        verdict::judge(&end, told, errors.last().as_deref())?;
        Ok(output.output())
    }
}

/// Writes the payload, and closes. A command that does not read all of it is free to do so.
async fn feed(mut stdin: pipe::Sender, payload: &[u8], child: &Child) {
    tokio::select! {
        _closed = stdin.write_all(payload) => {}
        _end = child.wait() => {}
    }
}
