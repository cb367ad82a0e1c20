//! How a handler that is a command is started: `CommandRules`, and what a file says of it. It is run elsewhere.

use std::path::PathBuf;
use std::time::Duration;

use taskonce_core::units::written;

use super::Fault;
use super::builder::Layer;

/// From the polite signal to the one that no process survives, unless said otherwise.
pub const KILL_AFTER: Duration = Duration::from_secs(5);
/// The longest that a command may be asked politely to end.
const KILL_AFTER_MAX: Duration = Duration::from_secs(3600);
/// The beginning of the variables that every command is given.
const OURS: &str = "TASKONCE_";

/// A handler that is a command, and how it is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandRules {
    /// The program and its arguments; at least one. No shell reads them.
    pub command: Vec<String>,
    /// One process a task, or one for many.
    pub mode: Mode,
    /// How long it may take to end after SIGTERM; then it is killed. Default 5 s.
    pub kill_after: Duration,
    /// After so many tasks a process of a pool is replaced by a new one; `None`: never.
    pub tasks_max: Option<u32>,
    /// The folder that it starts in, and that a relative program is looked for in; `None`: the worker's.
    pub directory: Option<PathBuf>,
    /// Variables that are added to the worker's environment.
    pub environment: Vec<(String, String)>,
}

impl CommandRules {
    /// This command, one process a task.
    #[must_use]
    pub fn new(command: impl IntoIterator<Item = impl Into<String>>) -> CommandRules {
        CommandRules {
            command: command.into_iter().map(Into::into).collect(),
            mode: Mode::Process,
            kill_after: KILL_AFTER,
            tasks_max: None,
            directory: None,
            environment: Vec::new(),
        }
    }
}

/// How many tasks a process sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One: nothing of a task is left for the next.
    #[default]
    Process,
    /// Many, one after the other, told by lines: nothing is spent on starting it.
    Pool,
}

impl Mode {
    /// Both.
    pub const ALL: [Mode; 2] = [Mode::Process, Mode::Pool];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Mode::Process => "process",
            Mode::Pool => "pool",
        }
    }
}

/// What a layer says of a command; what is `None` is inherited.
#[derive(Clone, Debug, Default)]
pub(super) struct Said {
    pub(super) command: Option<Vec<String>>,
    pub(super) mode: Option<Mode>,
    pub(super) kill_after: Option<Duration>,
    pub(super) tasks_max: Option<Option<u32>>,
    pub(super) directory: Option<String>,
    pub(super) environment: Option<Vec<(String, String)>>,
}

/// The names of what `Said` holds, as a file has them.
pub const COMMAND_NAMES: &[&str] = &["command", "mode", "kill_after", "tasks_max", "directory", "environment"];

impl Said {
    fn over(&self, before: &Said) -> Said {
        Said {
            command: self.command.clone().or_else(|| before.command.clone()),
            mode: self.mode.or(before.mode),
            kill_after: self.kill_after.or(before.kill_after),
            tasks_max: self.tasks_max.or(before.tasks_max),
            directory: self.directory.clone().or_else(|| before.directory.clone()),
            environment: self.environment.clone().or_else(|| before.environment.clone()),
        }
    }

    /// The first that is said of how it is started.
    fn first(&self) -> Option<&'static str> {
        let said = [
            self.command.is_some(),
            self.mode.is_some(),
            self.kill_after.is_some(),
            self.tasks_max.is_some(),
            self.directory.is_some(),
            self.environment.is_some(),
        ];
        COMMAND_NAMES.iter().zip(said).find_map(|(name, said)| said.then_some(*name))
    }
}

/// What is wrong with what one layer says, whatever the others do.
pub(super) fn alone(layer: &Layer, faults: &mut Vec<Fault>) {
    let said = &layer.command;
    let mut fault = |setting: &str, text: &str, hint: &str| faults.push(layer.fault(setting, text, hint));
    if let Some(command) = &said.command {
        if command.first().is_none_or(String::is_empty) {
            fault("command", "`command` names no program", "write `command = [\"./charge.sh\"]`");
        } else if command.iter().any(|word| word.contains('\0')) {
            fault("command", "`command` has a zero byte", "take it out: no program can be given one");
        }
    }
    if said.kill_after.is_some_and(|after| after > KILL_AFTER_MAX) {
        let text = format!("`kill_after` is above {}", written(KILL_AFTER_MAX));
        fault("kill_after", &text, "lower it: a stop of the worker waits for it");
    }
    if said.tasks_max == Some(Some(0)) {
        fault("tasks_max", "`tasks_max` is 0", "say at least 1, or `\"none\"` for no limit");
    }
    if said.directory.as_ref().is_some_and(|path| path.is_empty() || path.contains('\0')) {
        fault("directory", "`directory` names no folder", "name one, or leave it out for the worker's own");
    }
    for (name, value) in said.environment.iter().flatten() {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let text = format!("`environment` has no variable `{}`", name.escape_debug());
            fault("environment", &text, "write `environment = { NAME = \"value\" }`, without zero bytes");
        } else if name.starts_with(OURS) {
            let text = format!("`environment` sets `{name}`, and those of `{OURS}` are the worker's");
            fault("environment", &text, "name it otherwise");
        }
    }
}

/// The command of one version of a handler, and what is said and means nothing.
pub(super) fn resolve(general: Option<&Layer>, specific: Option<&Layer>) -> (Option<CommandRules>, Option<Fault>) {
    let layers = [general, specific].into_iter().flatten();
    let said = layers.fold(Said::default(), |before, layer| layer.command.over(&before));
    let warning = |setting: &str, text: String, hint: &str| {
        let layers = [specific, general].into_iter().flatten();
        let of = layers.min_by_key(|layer| !layer.lines.contains_key(setting))?;
        Some(of.fault(setting, text, hint))
    };
    let Some(command) = said.command.clone() else {
        let useless = said.first().and_then(|name| {
            warning(name, format!("`{name}` says nothing without `command`"), "set `command`, or leave it out")
        });
        return (None, useless);
    };
    let mode = said.mode.unwrap_or_default();
    let useless = match (mode, said.tasks_max.flatten()) {
        (Mode::Process, Some(_)) => {
            let text = "`tasks_max` says nothing where each task has a process of its own".to_owned();
            warning("tasks_max", text, "set `mode = \"pool\"`, or leave it out")
        }
        (Mode::Process | Mode::Pool, _) => None,
    };
    let rules = CommandRules {
        command,
        mode,
        kill_after: said.kill_after.unwrap_or(KILL_AFTER),
        tasks_max: said.tasks_max.flatten(),
        directory: said.directory.map(PathBuf::from),
        environment: said.environment.unwrap_or_default(),
    };
    (Some(rules), useless)
}
