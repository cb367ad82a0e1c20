//! The desk where writes wait, and the thread that takes those that wait together. How they are committed is in `commit`.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use taskonce_core::error::{Error, ErrorKind, Result};
use tokio::sync::oneshot;

use crate::Content;
use crate::commit::Others;
use crate::fault::about;
use crate::live::Live;

/// The most writes of one commit.
const BATCH_MAX: usize = 256;
/// A commit takes no further write once it brings so many bytes, so that no caller waits for megabytes of many others.
const BATCH_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The most writes that wait, in one process.
const QUEUE_MAX: usize = 65_536;
/// How long a process lets the others go first after each of its commits, while others write too: one nap of theirs.
const PAUSE: Duration = Duration::from_micros(300);
/// How long another process counts as writing too after it was noticed.
const SHARED_FOR: Duration = Duration::from_secs(1);
/// What the guard adds to a deadline, so that the writer's own, better error comes first.
const GRACE: Duration = Duration::from_millis(15);

type Reply<C> = oneshot::Sender<Result<<C as Content>::Answer>>;

/// Where writes wait for the writer, and callers for their answers.
pub(crate) struct Desk<C: Content> {
    state: Mutex<State<C>>,
    /// Wakes the writer.
    work: Condvar,
    /// Wakes the guard.
    watch: Condvar,
    /// Wakes who waits for the threads to end.
    ended: Condvar,
}

struct State<C: Content> {
    queue: VecDeque<Waiting<C>>,
    /// The callers of the batch that is being written, in its order; none where the guard has answered, or nobody asked.
    flight: Vec<Option<(Instant, Reply<C>)>>,
    is_closed: bool,
    has_writer: bool,
    has_guard: bool,
    guard_is_idle: bool,
}

struct Waiting<C: Content> {
    job: C::Job,
    deadline: Instant,
    /// Who wants to know; none where nobody does.
    reply: Option<Reply<C>>,
}

impl<C: Content> Waiting<C> {
    /// Nobody waits any more for a write whose future was dropped.
    fn is_given_up(&self) -> bool {
        self.reply.as_ref().is_some_and(oneshot::Sender::is_closed)
    }
}

impl<C: Content> Default for Desk<C> {
    fn default() -> Desk<C> {
        let state = State {
            queue: VecDeque::new(),
            flight: Vec::new(),
            is_closed: false,
            has_writer: false,
            has_guard: false,
            guard_is_idle: false,
        };
        Desk { state: Mutex::new(state), work: Condvar::new(), watch: Condvar::new(), ended: Condvar::new() }
    }
}

impl<C: Content> Desk<C> {
    fn lock(&self) -> MutexGuard<'_, State<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the threads, and waits for them within the deadline.
    pub(crate) fn close(&self, patience: Duration) {
        let mut state = self.lock();
        state.is_closed = true;
        self.work.notify_all();
        self.watch.notify_all();
        let deadline = Instant::now() + patience;
        while state.has_writer || state.has_guard {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for something to write, and says until when the first caller waits. Nothing when the file is closed.
    fn wait(&self) -> Option<Instant> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            while state.queue.front().is_some_and(Waiting::is_given_up) {
                state.queue.pop_front();
            }
            if let Some(first) = state.queue.front() {
                return Some(first.deadline);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes what waits into flight.
    pub(crate) fn take(&self) -> Vec<C::Job> {
        let mut state = self.lock();
        let mut jobs = Vec::with_capacity(state.queue.len().min(BATCH_MAX));
        let State { queue, flight, .. } = &mut *state;
        flight.clear();
        let mut bytes = 0_usize;
        while jobs.len() < BATCH_MAX
            && bytes < BATCH_BYTES_MAX
            && let Some(waiting) = queue.pop_front()
        {
            if waiting.is_given_up() {
                continue;
            }
            bytes = bytes.saturating_add(C::size(&waiting.job));
            jobs.push(waiting.job);
            flight.push(waiting.reply.map(|reply| (waiting.deadline, reply)));
        }
        jobs
    }

    /// Answers the batch that was in flight.
    fn answer(&self, answers: impl IntoIterator<Item = Result<C::Answer>>) {
        let flight = std::mem::take(&mut self.lock().flight);
        for (caller, answer) in flight.into_iter().zip(answers) {
            if let Some((_, reply)) = caller {
                // A dropped future wants no answer.
                let _ = reply.send(answer);
            }
        }
    }

    /// Refuses the callers whose time is up, in flight or waiting.
    fn refuse_late(&self, now: Instant, why: &Error) {
        let mut state = self.lock();
        let mut late = Vec::new();
        for caller in &mut state.flight {
            late.extend(caller.take_if(|(deadline, _)| *deadline <= now).map(|(_, reply)| reply));
        }
        while let Some(waiting) = state.queue.pop_front_if(|first| first.deadline <= now) {
            late.extend(waiting.reply);
        }
        drop(state);
        refuse::<C>(late, why);
    }

    /// Refuses the callers in flight, whose jobs are gone. Those who wait keep their turn.
    fn refuse_flight(&self, why: &Error) {
        let flight = std::mem::take(&mut self.lock().flight);
        refuse::<C>(flight.into_iter().flatten().map(|(_, reply)| reply).collect(), why);
    }

    /// Refuses all who wait or are in flight.
    fn refuse_all(&self, why: &Error) {
        let mut state = self.lock();
        let mut all: Vec<Reply<C>> = state.flight.drain(..).flatten().map(|(_, reply)| reply).collect();
        all.extend(state.queue.drain(..).filter_map(|waiting| waiting.reply));
        drop(state);
        refuse::<C>(all, why);
    }
}

fn refuse<C: Content>(callers: Vec<Reply<C>>, why: &Error) {
    for reply in callers {
        let _ = reply.send(Err(why.again()));
    }
}

impl<C: Content> Live<C> {
    /// Hands a job to the writer, which answers within the deadline. A job whose answer is dropped before it was begun is not done.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] where too many wait already, [`ErrorKind::Unreachable`] where no thread can be started.
    pub fn ask(self: &Arc<Live<C>>, job: C::Job) -> Result<oneshot::Receiver<Result<C::Answer>>> {
        let (reply, answer) = oneshot::channel();
        self.hand_over(job, Some(reply))?;
        Ok(answer)
    }

    /// Hands a job to the writer whose answer nobody needs. It is done if it can be.
    pub fn tell(self: &Arc<Live<C>>, job: C::Job) {
        // What cannot be handed over is not done: nobody waits for it.
        let _ = self.hand_over(job, None);
    }

    fn hand_over(self: &Arc<Live<C>>, job: C::Job, reply: Option<Reply<C>>) -> Result<()> {
        let deadline = Instant::now() + self.options().timeout;
        let mut state = self.desk.lock();
        if state.queue.len() >= QUEUE_MAX {
            return Err(about(self.path(), ErrorKind::TimedOut, format!("{QUEUE_MAX} writes wait already")));
        }
        if !state.has_writer {
            self.spawn("taskonce-write", Live::write_until_closed)?;
            state.has_writer = true;
        }
        if !state.has_guard {
            self.spawn("taskonce-guard", Live::guard_until_closed)?;
            state.has_guard = true;
        }
        let is_first = state.queue.is_empty();
        let guard_sleeps = std::mem::take(&mut state.guard_is_idle);
        state.queue.push_back(Waiting { job, deadline, reply });
        drop(state);
        if is_first {
            self.desk.work.notify_one();
        }
        if guard_sleeps {
            self.desk.watch.notify_one();
        }
        Ok(())
    }

    fn spawn(self: &Arc<Live<C>>, name: &str, run: fn(&Arc<Live<C>>)) -> Result<()> {
        let live = Arc::clone(self);
        std::thread::Builder::new().name(name.to_owned()).spawn(move || run(&live)).map(drop).map_err(|error| {
            about(self.path(), ErrorKind::Unreachable, format!("starting a thread failed: {error}")).with_source(error)
        })
    }

    /// Answers in time when the writer cannot, because the disk hangs. Sleeps while nobody waits.
    fn guard_until_closed(self: &Arc<Live<C>>) {
        let mut state = self.desk.lock();
        while !state.is_closed {
            let in_flight = state.flight.iter().flatten().map(|(deadline, _)| *deadline);
            let first = in_flight.chain(state.queue.front().map(|first| first.deadline)).min();
            state.guard_is_idle = first.is_none();
            let Some(first) = first else {
                state = self.desk.watch.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = (first + GRACE).saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                let why =
                    about(self.path(), ErrorKind::TimedOut, format!("no commit within {:?}", self.options().timeout));
                self.desk.refuse_late(
                    first,
                    &why.with_hint(
                        "the disk is slow or hangs; raise `timeout` in the file's URL if that is normal here",
                    ),
                );
                state = self.desk.lock();
            } else {
                state = self.desk.watch.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state.has_guard = false;
        self.desk.ended.notify_all();
    }

    fn write_until_closed(self: &Arc<Live<C>>) {
        let _end = WriterEnd(self);
        let mut shared_until = Instant::now();
        while let Some(deadline) = self.desk.wait() {
            if Instant::now() < shared_until {
                std::thread::sleep(PAUSE);
            }
            self.turn.wait_until(deadline);
            let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let written = self.write_batch(&mut writer);
            // Put down before anyone is answered: who has an answer may fork.
            drop(writer);
            let mut is_shared = self.turn.take_waited();
            match written {
                Ok(batch) => {
                    is_shared |= batch.others == Others::Wrote;
                    self.desk.answer(batch.answers);
                }
                Err(error) if error.kind() == ErrorKind::Locked => {
                    self.desk.refuse_flight(&error);
                    self.desk.refuse_late(Instant::now(), &error);
                }
                Err(error) => self.desk.refuse_all(&error),
            }
            if is_shared {
                shared_until = Instant::now() + SHARED_FOR;
            }
        }
        // The last connection of all writes the log back into the file, while the drop of the file waits.
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.discard_readers();
    }
}

/// Makes room for another writer when this one ends, in a panic too: who waits is told, and the next write starts one.
struct WriterEnd<'live, C: Content>(&'live Arc<Live<C>>);

impl<C: Content> Drop for WriterEnd<'_, C> {
    fn drop(&mut self) {
        let desk = &self.0.desk;
        desk.refuse_all(&about(self.0.path(), ErrorKind::Unreachable, "the thread that writes has ended"));
        desk.lock().has_writer = false;
        desk.ended.notify_all();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rusqlite::Connection;

    use super::*;
    use crate::connect::{Purpose, Turn, connect, prepare};
    use crate::options::Options;
    use crate::{Kind, Room};

    /// Rows that are counted: content as small as there can be.
    pub(crate) struct Pond;

    impl Content for Pond {
        type Job = i64;
        type Answer = i64;
        const KIND: &'static Kind =
            &Kind { application_id: 7, steps: &["CREATE TABLE fish (weight INTEGER) STRICT"], noun: "pond" };

        fn room(_weight: &i64) -> Room {
            Room::Takes
        }

        fn size(weight: &i64) -> usize {
            usize::try_from(*weight).unwrap()
        }

        fn write(conn: &Connection, _now: i64, jobs: &mut [i64]) -> rusqlite::Result<Vec<Result<i64>>> {
            jobs.iter()
                .map(|weight| {
                    conn.execute("INSERT INTO fish VALUES (?1)", [*weight])?;
                    conn.query_row("SELECT sum(weight) FROM fish", [], |row| row.get(0)).map(Ok)
                })
                .collect()
        }
    }

    fn open(path: &std::path::Path, options: &Options) -> Arc<Live<Pond>> {
        let turn = Turn::new(options.timeout);
        let conn = connect(Pond::KIND, path, options, Purpose::Open, &turn).unwrap();
        prepare(Pond::KIND, &conn, path, options).unwrap();
        Live::new(path.to_owned(), options.clone(), Some(conn), turn)
    }

    /// Once a commit was bounded by its number of writes only: 256 payloads of 64 MiB.
    #[test]
    fn a_commit_is_bounded_by_its_bytes_and_by_its_number() {
        let desk: Desk<Pond> = Desk::default();
        let (small, large) = (1, BATCH_BYTES_MAX as i64);
        let deadline = Instant::now();
        let jobs = [small, large, large, small].into_iter().chain(std::iter::repeat_n(small, BATCH_MAX));
        desk.lock().queue.extend(jobs.map(|job| Waiting { job, deadline, reply: None }));
        assert_eq!(desk.take(), [small, large]);
        assert_eq!(desk.take(), [large]);
        assert_eq!(desk.take(), [small; BATCH_MAX]);
        assert_eq!(desk.take(), [small]);
        assert_eq!(desk.take(), [0_i64; 0]);
    }

    /// Once what was told was dropped like what nobody waits for.
    #[test]
    fn what_is_told_is_done_though_nobody_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let live = open(&folder.path().join("tasks.db"), &Options::default());
        live.tell(5);
        assert_eq!(live.ask(2).unwrap().blocking_recv().unwrap().unwrap(), 7);
        live.desk.close(Duration::from_secs(20));
    }

    /// Once only those whose time was up were told so. The others of the batch were left to the guard, which told them
    /// of a disk that hangs.
    #[test]
    fn a_batch_that_is_locked_at_its_commit_is_answered_with_its_own_cause() {
        const BOUND: Duration = Duration::from_secs(20);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tasks.db");
        let options = Options { timeout: Duration::from_millis(500), ..Options::default() };
        let turn = Turn::new(options.timeout);
        let conn = connect(Pond::KIND, &path, &options, Purpose::Open, &turn).unwrap();
        // Without a write-ahead log a reader holds up the commit, not the turn.
        conn.execute_batch(Pond::KIND.steps[0]).unwrap();
        conn.pragma_update(None, "application_id", Pond::KIND.application_id).unwrap();
        conn.pragma_update(None, "user_version", Pond::KIND.version()).unwrap();
        let live: Arc<Live<Pond>> = Live::new(path.clone(), options.clone(), Some(conn), turn);
        let (beside, reading) = (Connection::open(&path).unwrap(), Connection::open(&path).unwrap());
        reading.execute_batch("BEGIN; SELECT * FROM fish").unwrap();
        beside.execute_batch("BEGIN IMMEDIATE").unwrap();

        let began = Instant::now();
        let first = live.ask(1).unwrap();
        while began.elapsed() < options.timeout / 2 {
            std::thread::yield_now();
        }
        let second = live.ask(1).unwrap();
        beside.execute_batch("ROLLBACK").unwrap();
        // The guard may come first to the one whose time was up.
        first.blocking_recv().unwrap().unwrap_err();
        let error = second.blocking_recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Locked, "{error:?}");
        reading.execute_batch("ROLLBACK").unwrap();
        live.ask(1).unwrap().blocking_recv().unwrap().unwrap();
        live.desk.close(BOUND);
    }
}
