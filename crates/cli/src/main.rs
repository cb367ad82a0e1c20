//! The command line of taskonce: run any program once.

mod args;
mod change;
mod commands;
mod dead;
mod demo;
mod exit;
mod export;
mod given;
mod key;
mod list;
mod migrate;
mod plain;
mod doctor;
mod purge;
mod queue;
mod report;
mod routes;
mod run;
mod send;
mod show;
mod sources;
mod store;
mod top;
mod view;
mod width;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind as Refusal;

use args::{Cli, Command, Common};
use exit::Code;
use report::{Form, Result, Trouble};
use taskonce::units;

fn main() -> ExitCode {
    let argv: Vec<OsString> = std::env::args_os().collect();
    if argv.get(1).is_some_and(|word| word == run::guard::WORD) {
        return run::guard::main(&argv[2..]);
    }
    if argv.get(1).is_some_and(|word| word == run::exec::WORD) {
        return run::exec::main(&argv[2..]);
    }
    if argv.get(1).is_some_and(|word| word == demo::worker::WORD) {
        return demo::worker::main(&argv[2..]);
    }
    if argv.get(1).is_some_and(|word| word == commands::warden::WORD) {
        return commands::warden::main(&argv[2..]);
    }
    let cli = match Cli::try_parse_from(&argv) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error, &argv),
    };
    let form = if cli.common.json { Form::Json } else { Form::Text };
    // `run` decides itself: the command's own result counts, whether or not anybody could read it.
    let runs = matches!(cli.command, Command::Run(_));
    match dispatch(cli.command, &cli.common, form) {
        Ok(_) if report::is_unwritten() && !runs => Code::Unwritten.exit(),
        Ok(code) => code,
        Err(trouble) => {
            report::trouble(form, &trouble);
            trouble.code.exit()
        }
    }
}

fn dispatch(command: Command, common: &Common, form: Form) -> Result<ExitCode> {
    match command {
        Command::Run(args) => run::run(&args, common, form),
        Command::Key(args) => key::key(&args, form),
        Command::Show(args) => show::show(&args, common, form),
        Command::List(args) => list::list(&args, common, form),
        Command::Redrive(args) => change::redrive(&args, common, form),
        Command::Clear(args) => change::clear(&args, common, form),
        Command::Resolve(args) => change::resolve(&args, common, form),
        Command::Purge(args) => purge::purge(&args, common, form),
        Command::Migrate(args) => migrate::migrate(&args, common, form),
        Command::Doctor(args) => doctor::doctor(&args, common, form),
        Command::Routes(args) => routes::routes(&args, form),
        Command::Queue(args) => queue::queue(&args, common, form),
        Command::Top(args) => top::top(&args, common, form),
        Command::Dead(args) => dead::dead(&args, common, form),
        Command::Send(args) => send::send(&args, common, form),
        Command::Work(args) => commands::work(&args, common, form),
        Command::Demo(args) => demo::demo(&args, common, form),
        Command::Completions { shell } => export::completions(shell, form),
        Command::Man { subcommand } => export::man(subcommand.as_deref(), form),
    }
}

/// Help and version are data; anything else that clap returns is wrong usage.
fn refuse(error: &clap::Error, argv: &[OsString]) -> ExitCode {
    match error.kind() {
        Refusal::DisplayHelp | Refusal::DisplayVersion => {
            report::data(&error.to_string());
            return if report::is_unwritten() { Code::Unwritten.exit() } else { Code::Fine.exit() };
        }
        Refusal::DisplayHelpOnMissingArgumentOrSubcommand => {
            report::say(error.to_string().trim_end());
            return Code::Usage.exit();
        }
        _ => {}
    }
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = text.find("\n\nFor more information").unwrap_or(text.len());
    let words = argv.iter().skip(1).filter_map(|word| word.to_str());
    let hint = match words.into_iter().find(|word| is_subcommand(word)) {
        Some(subcommand) => format!("`taskonce {subcommand} --help` shows what can be given"),
        None => "`taskonce --help` shows what can be given".to_owned(),
    };
    let json = argv.iter().take_while(|word| *word != "--").any(|word| word == "--json");
    report::trouble(if json { Form::Json } else { Form::Text }, &Trouble::usage(text[..end].trim_end(), hint));
    Code::Usage.exit()
}

fn is_subcommand(word: &str) -> bool {
    <Cli as clap::CommandFactory>::command().get_subcommands().any(|command| command.get_name() == word)
}

/// Drives one subcommand's calls of the store.
fn block_on<F: Future>(future: F) -> Result<F::Output> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
        Trouble::new(Code::StoreAway, "no_runtime", format!("no event loop: {error}"), "raise the limit of open files")
    })?;
    Ok(runtime.block_on(future))
}
