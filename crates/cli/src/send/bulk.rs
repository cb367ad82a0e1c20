//! Sends a file of tasks, a line each: many under way at once, none lost, and what is refused told by its line.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use taskonce::send::{Entered, NewTask, Sender};
use taskonce::{Error, ErrorKind, Retry};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{Maker, json_of};
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::{block_on, plain, view};

/// The most tasks under way at once: as many as share a few commits.
const UNDER_WAY_MAX: usize = 256;
/// The most lines that were read and are not under way yet.
const LINES_READ_MAX: usize = 256;
/// The longest line, in bytes; a source may take less.
const LINE_MAX: usize = 64 * 1024 * 1024;
/// How often a task is sent before it counts as not sent, where that may pass.
const TRIES_MAX: u32 = 6;
/// The first pause between two of them; each is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(100);
/// The most refused lines that are told with their reason, to people.
const REFUSED_SHOWN_MAX: u64 = 20;
/// The most ranges of refused lines that are kept.
const RANGES_MAX: usize = 10_000;

/// A line of the input.
struct Line {
    number: u64,
    /// How much of the input is read with it, in bytes.
    read: u64,
    /// `None` for one that is longer than [`LINE_MAX`].
    text: Option<Vec<u8>>,
}

/// What became of the lines.
#[derive(Default)]
struct Sum {
    accepted: u64,
    already_queued: u64,
    already_done: u64,
    ended: u64,
    refused: u64,
    /// First and last of each run of refused lines.
    ranges: Vec<(u64, u64)>,
}

/// Why not all lines were sent.
struct Stop {
    /// The first that may not be.
    line: u64,
    why: Trouble,
}

pub(super) fn send(maker: &Maker<'_>, sender: &Sender, from: &OsStr, from_line: u64, form: Form) -> Result<ExitCode> {
    let (input, size): (Box<dyn Read + Send>, Option<u64>) = if from == "-" {
        (Box::new(io::stdin()), None)
    } else {
        let failed = |error: io::Error| {
            Trouble::usage(format!("file `{}`: {error}", from.display()), "name a readable file, or `-` for stdin")
        };
        let file = File::open(from).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        (Box::new(file), Some(size).filter(|size| *size > 0))
    };
    let (sum, stop) = block_on(run(maker, sender, input, size, from_line, form))?;
    match form {
        Form::Json => report::data_json(&json!({ "summary": sum.json(stop.as_ref()) })),
        Form::Text => report::data(&format!("{}\n", sum.sentence())),
    }
    match stop {
        Some(stop) => Err(stop.why),
        None if sum.refused > 0 => Ok(Code::Usage.exit()),
        None => Ok(Code::Fine.exit()),
    }
}

async fn run(
    maker: &Maker<'_>,
    sender: &Sender,
    input: Box<dyn Read + Send>,
    size: Option<u64>,
    from_line: u64,
    form: Form,
) -> (Sum, Option<Stop>) {
    let bar = bar(size);
    let (hand, mut lines) = mpsc::channel(LINES_READ_MAX);
    // A thread of its own: reading stdin may take for ever, and nobody waits for it in the end.
    let _reader = std::thread::spawn(move || read(input, from_line, &hand));
    let mut under_way: JoinSet<(u64, taskonce::Result<Entered>)> = JoinSet::new();
    let (mut sum, mut stop, mut is_read, mut next) = (Sum::default(), None::<Stop>, false, from_line);
    let mut interrupted = std::pin::pin!(ends());
    // Each round takes a line or ends one that is under way.
    while !is_read || !under_way.is_empty() {
        tokio::select! {
            () = &mut interrupted, if stop.is_none() => {
                is_read = true;
                stop_at(&mut stop, next, |line| stopped(line, "a signal came"));
            }
            Some(ended) = under_way.join_next(), if !under_way.is_empty() => {
                // The task of the runtime neither panics nor is cancelled.
                let Ok((number, entered)) = ended else { continue };
                match entered {
                    Ok(entered) => sum.count(number, &entered, form, &bar),
                    Err(error) if is_of_the_task(&error) => sum.refuse(number, &error.into(), form, &bar),
                    Err(error) => {
                        is_read = true;
                        stop_at(&mut stop, number, |line| failed(line, &error));
                    }
                }
            }
            line = lines.recv(), if !is_read && under_way.len() < UNDER_WAY_MAX => match line {
                None => is_read = true,
                Some(Err(error)) => {
                    is_read = true;
                    stop_at(&mut stop, next, |line| stopped(line, &format!("the input cannot be read: {error}")));
                }
                Some(Ok(Line { number, read, text })) => {
                    next = number + 1;
                    if size.is_some() {
                        bar.set_position(read);
                    }
                    match text.map(|text| maker.make(text)) {
                        Some(Ok(task)) => drop(under_way.spawn(send_one(sender.clone(), number, task))),
                        Some(Err(error)) => sum.refuse(number, &error.into(), form, &bar),
                        None => sum.refuse(number, &too_long(), form, &bar),
                    }
                }
            },
        }
        bar.set_message(sum.short());
    }
    bar.finish_and_clear();
    (sum, stop)
}

/// Ends at ctrl-C or SIGTERM; where they cannot be heeded they end the process as ever.
async fn ends() {
    match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        Ok(mut terminated) => {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminated.recv() => {}
            }
        }
        Err(_) => std::future::pending().await,
    }
}

async fn send_one(sender: Sender, number: u64, task: NewTask) -> (u64, taskonce::Result<Entered>) {
    let mut pause = PAUSE;
    for _ in 1..TRIES_MAX {
        match sender.send(&task).await {
            Err(error) if error.kind().retry() == Retry::Later => {
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            entered => return (number, entered),
        }
    }
    (number, sender.send(&task).await)
}

/// Whether an error is of this one task, so that others can be sent: it breaks a limit, or its record is damaged or held.
fn is_of_the_task(error: &Error) -> bool {
    error.kind() == ErrorKind::BadEnvelope || error.subject().is_some_and(|subject| subject.starts_with("task `"))
}

/// Remembers the first line that may not be sent.
fn stop_at(stop: &mut Option<Stop>, line: u64, why: impl FnOnce(u64) -> Trouble) {
    if stop.as_ref().is_none_or(|stop| line < stop.line) {
        *stop = Some(Stop { line, why: why(line) });
    }
}

fn failed(line: u64, error: &Error) -> Trouble {
    let text = format!("stopped at line {line}: {error}");
    Trouble::new(Code::of(error.kind()), error.kind().name(), text, format!("{}; {}", error.hint(), go_on(line)))
}

fn stopped(line: u64, why: &str) -> Trouble {
    Trouble::new(Code::StoreAway, "stopped", format!("stopped at line {line}: {why}"), go_on(line))
}

fn go_on(line: u64) -> String {
    format!("all lines before it are sent, or refused above; `--from-line {line}` goes on there")
}

fn too_long() -> Trouble {
    Trouble::new(
        Code::Usage,
        "too_large",
        "it is longer than 64 MiB",
        "keep the large part elsewhere, and send where it is",
    )
}

/// Hands over one line after the other. Blank ones are none.
fn read(input: Box<dyn Read + Send>, from_line: u64, hand: &mpsc::Sender<io::Result<Line>>) {
    let mut input = BufReader::with_capacity(64 * 1024, input);
    let (mut number, mut read) = (0, 0);
    // Each round reads a line, to the end of the input or until nobody takes them any more.
    loop {
        number += 1;
        let line = match one_line(&mut input) {
            Ok(None) => return,
            Ok(Some((len, text))) => {
                read += len;
                let is_blank = text.as_ref().is_some_and(|text| text.iter().all(u8::is_ascii_whitespace));
                if is_blank || number < from_line {
                    continue;
                }
                Ok(Line { number, read, text })
            }
            Err(error) => Err(error),
        };
        let is_last = line.is_err();
        if hand.blocking_send(line).is_err() || is_last {
            return;
        }
    }
}

/// The next line, without its end, and how many bytes it took; a longer one than [`LINE_MAX`] is passed over.
fn one_line(input: &mut impl BufRead) -> io::Result<Option<(u64, Option<Vec<u8>>)>> {
    let mut text = Vec::new();
    let mut len = input.by_ref().take(LINE_MAX as u64 + 2).read_until(b'\n', &mut text)? as u64;
    if len == 0 {
        return Ok(None);
    }
    let mut is_long = false;
    while text.last() != Some(&b'\n') && text.len() > LINE_MAX {
        is_long = true;
        text.clear();
        let more = input.by_ref().take(LINE_MAX as u64 + 1).read_until(b'\n', &mut text)? as u64;
        len += more;
        if more == 0 {
            break;
        }
    }
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    Ok(Some((len, (!is_long).then_some(text))))
}

impl Sum {
    fn count(&mut self, number: u64, entered: &Entered, form: Form, bar: &ProgressBar) {
        match entered {
            Entered::Accepted { .. } => self.accepted += 1,
            Entered::AlreadyQueued { .. } => self.already_queued += 1,
            Entered::AlreadyDone { .. } => self.already_done += 1,
            Entered::Ended { .. } => self.ended += 1,
            Entered::Mismatch { held, given, .. } => {
                let text = format!("its key stands for another payload: fingerprint {held}, and {given} here");
                let hint = "correct the id, or the fields that make it";
                let why =
                    Trouble::new(Code::Mismatch, "mismatch", text, hint).with("key", json!(entered.key().as_str()));
                return self.refuse(number, &why, form, bar);
            }
        }
        if form == Form::Json {
            let mut value = json_of(entered);
            value["line"] = json!(number);
            report::data_json(&value);
        }
    }

    fn refuse(&mut self, number: u64, why: &Trouble, form: Form, bar: &ProgressBar) {
        self.refused += 1;
        self.note(number);
        match form {
            Form::Json => report::data_json(&json!({ "line": number, "outcome": "refused", "error": why.to_json() })),
            Form::Text if self.refused <= REFUSED_SHOWN_MAX => {
                bar.suspend(|| report::say(format_args!("line {number} is refused: {}", plain::line(why.text()))));
            }
            Form::Text => {}
        }
    }

    /// Keeps that a line was refused. They come about in their order.
    fn note(&mut self, number: u64) {
        let at = self.ranges.partition_point(|(_, last)| *last < number);
        let follows = at > 0 && self.ranges[at - 1].1 + 1 == number;
        let precedes = self.ranges.get(at).is_some_and(|(first, _)| *first == number + 1);
        match (follows, precedes) {
            (true, true) => self.ranges[at - 1].1 = self.ranges.remove(at).1,
            (true, false) => self.ranges[at - 1].1 = number,
            (false, true) => self.ranges[at].0 = number,
            (false, false) if self.ranges.len() < RANGES_MAX => self.ranges.insert(at, (number, number)),
            (false, false) => {}
        }
    }

    fn total(&self) -> u64 {
        self.accepted + self.already_queued + self.already_done + self.ended + self.refused
    }

    fn short(&self) -> String {
        format!("{} sent, {} refused", self.total() - self.refused, self.refused)
    }

    fn sentence(&self) -> String {
        let parts = [
            (self.accepted, "accepted"),
            (self.already_queued, "already queued"),
            (self.already_done, "already done"),
            (self.ended, "dead or parked"),
            (self.refused, "refused"),
        ];
        let parts: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        let mut text = view::count(self.total(), "task");
        if !parts.is_empty() {
            text.push_str(&format!(": {}", parts.join(", ")));
        }
        if self.refused > 0 {
            let ranges = self.ranges.iter().map(|(first, last)| match last {
                last if last == first => first.to_string(),
                last => format!("{first}-{last}"),
            });
            let more = if self.ranges.len() == RANGES_MAX { ", and more" } else { "" };
            text.push_str(&format!("\nrefused: line {}{more}", ranges.collect::<Vec<_>>().join(", ")));
        }
        text
    }

    fn json(&self, stop: Option<&Stop>) -> Value {
        json!({
            "accepted": self.accepted,
            "already_queued": self.already_queued,
            "already_done": self.already_done,
            "dead_or_parked": self.ended,
            "refused": self.refused,
            "refused_lines": self.ranges.iter().map(|(first, last)| [first, last]).collect::<Vec<_>>(),
            "stopped_at_line": stop.map(|stop| stop.line),
        })
    }
}

/// A bar on stderr, where that is a terminal.
fn bar(size: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(size, ProgressDrawTarget::stderr());
    let template = if size.is_some() { "{bar:24} {percent:>3} %  {msg}" } else { "{spinner} {msg}" };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_lines_are_kept_as_ranges_in_any_order() {
        let mut sum = Sum::default();
        for line in [3, 5, 4, 9, 1] {
            sum.refused += 1;
            sum.note(line);
        }
        assert_eq!(sum.ranges, [(1, 1), (3, 5), (9, 9)]);
        assert_eq!(sum.sentence(), "5 tasks: 5 refused\nrefused: line 1, 3-5, 9");
    }

    #[test]
    fn lines_are_read_to_the_end_also_without_an_end_of_line() {
        let mut input = io::Cursor::new(b"a\n\nbc".to_vec());
        let mut lines = Vec::new();
        while let Some((len, text)) = one_line(&mut input).unwrap() {
            lines.push((len, text.unwrap()));
        }
        assert_eq!(lines, [(2, b"a".to_vec()), (1, vec![]), (2, b"bc".to_vec())]);
    }
}
