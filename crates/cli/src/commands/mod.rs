//! `work`: takes deliveries from the sources of a table of routes, and runs the commands that its handlers are.

mod args;
mod child;
mod facts;
mod log;
mod pool;
mod process;
mod streams;
mod verdict;
pub(crate) mod warden;

use std::collections::HashSet;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use taskonce::routes::{CommandRules, Fault, Mode, Refused, Route, Routes};
use taskonce::source::{self, Delivery, Source};
use taskonce::units::written;
use taskonce::worker::{Report, Worker, WorkerBuilder};
use taskonce::{Context, Effect, ErrorKind, Failure, Ledger, Output};
use tokio::sync::oneshot;

use crate::args::Common;
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};
use crate::run::signals::{self, Signals};
use crate::{plain, routes, store};
pub(crate) use args::WorkArgs;
use child::Crew;
use log::Log;
use pool::Pool;
use process::Process;

/// How long the ends of tasks that are cut off by a second signal may take to be written.
const RECORD_MAX: Duration = Duration::from_secs(2);
/// How long killed commands may take to be gone.
const GONE_MAX: Duration = Duration::from_secs(2);

/// How often it says how it stands, for `top`: one write each time.
const PUBLISH_EVERY: Duration = Duration::from_secs(5);

/// Works until a signal comes.
pub(crate) fn work(args: &WorkArgs, common: &Common, form: Form) -> Result<ExitCode> {
    let name = args.config.display().to_string();
    let routes = routes::load(&args.config)?;
    let url = store::of_table(common.store.as_deref(), routes.store())?;
    let sources = sources(&name, &routes)?;
    let ledger = store::open(Some(&url))?;
    check_ground(&name, &routes, &ledger)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| no_process(&error))?;
    Log::begin(form, args.log.level());
    let job = Job { args, form, url, ledger, sources, routes };
    let code = runtime.block_on(job.run());
    // A task that waits for a process which the kernel does not let go of holds up nobody.
    runtime.shutdown_timeout(Duration::ZERO);
    code
}

fn no_process(error: &std::io::Error) -> Trouble {
    let hint = "raise the limits of open files and of processes";
    Trouble::new(Code::StoreAway, "no_process", format!("no process or event loop: {error}"), hint)
}

fn fault(subject: String, text: impl Into<String>, hint: impl Into<String>) -> Fault {
    Fault { line: None, subject, text: text.into(), hint: hint.into() }
}

/// The routes whose handlers are commands.
fn served(routes: &Routes) -> impl Iterator<Item = (&Route, &Arc<CommandRules>)> {
    routes.iter().filter_map(|route| Some((route, routes.command(&route.handler)?)))
}

/// Opens every source that has something to do here.
fn sources(config: &str, routes: &Routes) -> Result<Vec<Arc<dyn Source>>> {
    let needed: HashSet<&str> = served(routes).map(|(route, _)| &*route.source).collect();
    let mut faults = Vec::new();
    if needed.is_empty() {
        let hint = "set `command` of a handler that has a route, such as `command = [\"./charge.sh\"]`";
        faults.push(fault(String::new(), "none of its handlers is a command", hint));
    }
    let mut opened = Vec::new();
    for rules in routes.sources().iter().filter(|rules| needed.contains(&*rules.name)) {
        let subject = || format!("source {}", rules.name);
        let Some(url) = &rules.url else {
            faults.push(fault(subject(), "nothing says what opens it", "set its `url`, such as `sqlite:queue.db`"));
            continue;
        };
        match source::open_named(url, &rules.name) {
            Ok(source) => opened.push(source),
            Err(error) if error.kind() == ErrorKind::BadUrl => {
                faults.push(fault(subject(), error.to_string(), error.hint()));
            }
            Err(error) => return Err(error.into()),
        }
    }
    if faults.is_empty() { Ok(opened) } else { Err(routes::trouble(config, &Refused { faults })) }
}

/// What a command with a transactional effect needs, and what a handler cannot be at once.
fn check_ground(config: &str, routes: &Routes, ledger: &Ledger) -> Result<()> {
    let system = ledger.store().ground().map(|ground| ground.system);
    let mut faults: Vec<Fault> = Vec::new();
    for (route, _) in served(routes).filter(|(route, _)| route.policy.effect == Effect::Transactional) {
        let subject = format!("route {}", route.name());
        if system != Some("postgresql") && system != Some("postgres") {
            let text = "its effect is transactional, and a command completes its task by plain SQL, in PostgreSQL only";
            let hint = "use a PostgreSQL store; or write the handler in Rust, with `run_in_transaction`";
            faults.push(fault(subject.clone(), text, hint));
        }
        let others = routes.iter().filter(|other| other.handler == route.handler);
        if others.into_iter().any(|other| other.policy.effect != Effect::Transactional) {
            let text = format!("{} is transactional here, and not from another source", route.handler);
            faults.push(fault(subject, text, "give each effect a version of its own"));
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(routes::trouble(config, &Refused { faults })) }
}

/// A handler that is a command.
#[derive(Clone)]
enum Handler {
    Process(Arc<Process>),
    Pool(Arc<Pool>),
}

impl Handler {
    fn new(crew: &Arc<Crew>, rules: &Arc<CommandRules>, name: &str) -> Handler {
        let (crew, rules) = (Arc::clone(crew), Arc::clone(rules));
        match rules.mode {
            Mode::Process => Handler::Process(Arc::new(Process { crew, rules })),
            Mode::Pool => Handler::Pool(Arc::new(Pool::new(crew, rules, name))),
        }
    }

    async fn run(self, context: Context, delivery: Delivery) -> std::result::Result<Output, Failure> {
        match self {
            Handler::Process(process) => process.run(context, delivery).await,
            Handler::Pool(pool) => pool.run(context, delivery).await,
        }
    }

    /// Gives it to a worker. One with a transactional effect completes its record itself.
    fn add(self, builder: WorkerBuilder, name: &str, effect: Effect) -> WorkerBuilder {
        match effect {
            Effect::Transactional => builder.handler_in_transaction(name, move |job| {
                let handler = self.clone();
                async move {
                    let taskonce::worker::Job { ledger, task, policy, delivery } = job;
                    let run = |context| async move { handler.run(context, delivery).await.map(drop) };
                    let outcome = taskonce::run_elsewhere(&ledger, &task, &policy, Duration::ZERO, run).await?;
                    outcome.try_map(|_output| Ok(()))
                }
            }),
            Effect::Keyed | Effect::Fenced | Effect::Unrepeatable | Effect::Repeatable => {
                builder.handler_of_delivery(name, move |context, delivery| self.clone().run(context, delivery))
            }
        }
    }
}

/// One run of a worker.
struct Job<'a> {
    args: &'a WorkArgs,
    form: Form,
    url: String,
    ledger: Ledger,
    sources: Vec<Arc<dyn Source>>,
    routes: Routes,
}

impl Job<'_> {
    async fn run(self) -> Result<ExitCode> {
        let mut signals = Signals::heed().map_err(|error| no_process(&error))?;
        let crew = Crew::new().map_err(|error| no_process(&error))?;
        let mut builder = Worker::builder(self.ledger.clone(), self.routes.clone()).grace(self.args.grace);
        builder = builder.publish_every(PUBLISH_EVERY);
        if let Some(count) = self.args.concurrency {
            builder = builder.concurrency_max(count as usize);
        }
        for source in &self.sources {
            builder = builder.source(Arc::clone(source));
        }
        let mut handlers = Vec::new();
        let mut seen = HashSet::new();
        for (route, rules) in served(&self.routes).filter(|(route, _)| seen.insert(Arc::clone(&route.handler))) {
            let handler = Handler::new(&crew, rules, &route.handler);
            handlers.push(handler.clone());
            builder = handler.add(builder, &route.handler, route.policy.effect);
        }
        let worker = builder.build()?;
        self.greet();
        let (stop, stopped) = oneshot::channel::<()>();
        let mut stop = Some(stop);
        let mut running = Box::pin(worker.run_until(async move {
            // The sender stays until it has sent.
            let _asked = stopped.await;
        }));
        let report = loop {
            tokio::select! {
                report = &mut running => break report,
                signal = signals.next_end() => match stop.take() {
                    Some(stop) => {
                        tracing::info!("{}: draining; a second signal ends it at once", signals::name(signal));
                        let _ended = stop.send(());
                    }
                    None => {
                        tracing::warn!("{}: ends at once, and kills what runs", signals::name(signal));
                        crew.kill_all();
                        // Killed commands are failed attempts, which are written at once.
                        let _late = tokio::time::timeout(RECORD_MAX, &mut running).await;
                        drop(running);
                        self.ledger.finish(RECORD_MAX).await;
                        crew.gone(GONE_MAX).await;
                        return Ok(ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX)));
                    }
                },
            }
        };
        let longest = served(&self.routes).map(|(_, rules)| rules.kill_after).max().unwrap_or_default();
        for handler in &handlers {
            match handler {
                Handler::Process(_) => {}
                Handler::Pool(pool) => pool.close(),
            }
        }
        {
            // A process of a pool has twice so long: to end by itself, and after it was asked to.
            let mut gone = pin!(crew.gone(longest * 2 + GONE_MAX));
            tokio::select! {
                _ = &mut gone => {}
                _signal = signals.next_end() => {}
            }
        }
        crew.kill_all();
        crew.gone(GONE_MAX).await;
        Ok(self.tell(&report))
    }

    /// One line for the worker, and one for each route.
    fn greet(&self) {
        let store = plain::line(&store::shown(Some(&self.url))).into_owned();
        let (grace, commands) = (written(self.args.grace), served(&self.routes).count());
        tracing::info!(event = "starts", store, grace, "works for {commands} of {} routes", self.routes.iter().len());
        for warning in self.routes.warnings() {
            tracing::warn!(hint = warning.hint, "{warning}");
        }
        for (route, rules) in served(&self.routes) {
            tracing::info!(
                event = "route",
                mode = rules.mode.name(),
                effect = route.policy.effect.name(),
                at_once = route.concurrency_max,
                "{}: {}",
                route.name(),
                rules.command.join(" ")
            );
        }
        for route in self.routes.iter().filter(|route| self.routes.command(&route.handler).is_none()) {
            tracing::info!(event = "route", "{}: no command, left to other workers", route.name());
        }
    }

    fn tell(&self, report: &Report) -> ExitCode {
        match self.form {
            Form::Text => {}
            Form::Json => report::data_json(&json!({
                "drained": report.drained,
                "given_back": report.given_back,
                "cut_off": report.cut_off,
                "not_settled": report.not_settled,
                "is_finished": report.is_finished,
                "counts": report.counts.all().filter(|(_, count)| *count > 0).collect::<std::collections::BTreeMap<_, _>>(),
            })),
        }
        if report.is_clean() { Code::Fine.exit() } else { Code::Busy.exit() }
    }
}
