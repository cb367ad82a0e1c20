//! `completions` and `man`: what packagers and shells take from the program.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;
use serde_json::json;

use crate::args::Cli;
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};

/// Prints a shell's completions.
pub(crate) fn completions(shell: Shell, form: Form) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "taskonce", &mut script);
    print(form, "script", &script)
}

/// Prints the man page of the program, or of one subcommand.
pub(crate) fn man(subcommand: Option<&str>, form: Form) -> Result<ExitCode> {
    let mut command = Cli::command();
    command.build();
    let command = match subcommand {
        None => command,
        Some(name) => match command.find_subcommand(name) {
            Some(found) => found.clone().name(format!("taskonce-{name}")).display_name(format!("taskonce-{name}")),
            None => {
                return Err(Trouble::usage(
                    format!("there is no subcommand `{}`", name.escape_debug()),
                    "`taskonce --help` lists the subcommands",
                ));
            }
        },
    };
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page).map_err(|error| {
        Trouble::new(Code::Usage, "man", format!("the man page cannot be rendered: {error}"), "report this as a bug")
    })?;
    print(form, "page", &page)
}

fn print(form: Form, name: &str, text: &[u8]) -> Result<ExitCode> {
    match form {
        Form::Text => report::data_bytes(text),
        Form::Json => report::data_json(&json!({ name: String::from_utf8_lossy(text) })),
    }
    Ok(Code::Fine.exit())
}
