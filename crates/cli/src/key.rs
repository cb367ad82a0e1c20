//! `key`: derives a key and explains how; and the payload of a command or an input, as `run` takes it.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::process::ExitCode;

use serde_json::json;
use taskonce::{ErrorKind, Fields, Input, Task};

use crate::args::{InputArgs, KeyArgs};
use crate::exit::Code;
use crate::report::{self, Form, Result, Trouble};

/// The longest input, in bytes: one GiB.
const INPUT_MAX: u64 = 1 << 30;

/// Derives a key and prints it, with what it was made of.
pub(crate) fn key(args: &KeyArgs, form: Form) -> Result<ExitCode> {
    let (handler, id) = match &args.key {
        Some(text) => {
            let (handler, id) = args.handler.of_key(text)?;
            (handler, Some(id))
        }
        None => (args.handler.handler()?, None),
    };
    let fields = fields(&args.input)?;
    let payload = match &args.input.input {
        Some(from) => Some(read(from)?),
        None if args.command.is_empty() => None,
        None => Some(words(&args.command)?),
    };
    let input = payload.as_deref().map(|bytes| parse(args, bytes)).transpose()?;
    let digest = input.as_ref().map(|input| input.digest(&fields)).transpose()?;
    let checked = checked(&args.input)?;
    let fingerprint = match (&input, &checked) {
        (Some(input), Some(checked)) => Some(input.fingerprint(checked)?),
        (Some(_) | None, _) => digest.map(|digest| digest.fingerprint()),
    };
    let key = match (&id, &digest) {
        (Some(id), _) => handler.key(id)?,
        (None, Some(digest)) => handler.key(&digest.id())?,
        (None, None) => {
            return Err(Trouble::usage("there is nothing to derive a key from", "pass `--key` or `--input`"));
        }
    };
    let canonical = input.as_ref().map(|input| input.canonical(&fields)).transpose()?;
    let canonical = canonical.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let downstream = key.downstream(&args.step);
    match form {
        Form::Json => report::data_json(&json!({
            "key": key.as_str(),
            "namespace": key.namespace(),
            "handler": key.handler(),
            "version": key.version(),
            "id": key.id(),
            "id_is": if args.key.is_some() { "given" } else { "derived" },
            "canonical": canonical,
            "digest": digest.map(|digest| digest.to_string()),
            "fingerprint": fingerprint.map(|fingerprint| fingerprint.to_string()),
            "step": args.step,
            "downstream_key": downstream.to_string(),
        })),
        Form::Text => {
            let mut text = String::new();
            let mut line = |name: &str, value: &str| {
                // Writing into a string cannot fail.
                let _ = writeln!(text, "{name:<13}{value}");
            };
            line("key", key.as_str());
            match args.key {
                Some(_) => line("id", &format!("{}  (given)", key.id())),
                None => line("id", &format!("{}  (the first 20 bytes of the digest)", key.id())),
            }
            match (&digest, &canonical, fingerprint) {
                (Some(digest), Some(canonical), Some(fingerprint)) => {
                    let of = if args.command.is_empty() { "the input" } else { "the command" };
                    let from = match checked {
                        Some(_) => "of the key's fields and those of `--fingerprint`",
                        None => "the first 16 bytes of the digest",
                    };
                    line("fingerprint", &format!("{fingerprint}  ({from})"));
                    line("digest", &format!("{digest}  (SHA-256 of the canonical form)"));
                    line("canonical", &format!("{canonical}  ({of})"));
                }
                (Some(_) | None, _, _) => line("fingerprint", "none  (pass the input, or the command after `--`)"),
            }
            let step = if args.step.is_empty() { "a task of one step".into() } else { format!("step `{}`", args.step) };
            line("downstream", &format!("{downstream}  ({step})"));
            report::data(&text);
        }
    }
    Ok(Code::Fine.exit())
}

fn parse<'a>(args: &KeyArgs, bytes: &'a [u8]) -> Result<Input<'a>> {
    match &args.input.input {
        Some(from) => document(from, bytes),
        None => Ok(Input::from_json(bytes)?),
    }
}

/// The task that `--key` and a command name: the payload is the command itself.
pub(crate) fn task_of_command(handler: &taskonce::Handler, id: &str, command: &[OsString]) -> Result<Task> {
    let payload = words(command)?;
    Ok(handler.task(id, &Input::from_json(&payload)?)?)
}

/// The task that an input names, by the chosen fields.
pub(crate) fn task_of_input(handler: &taskonce::Handler, from: &OsStr, bytes: &[u8], args: &InputArgs) -> Result<Task> {
    let document = document(from, bytes)?;
    let task = handler.task_from(&document, &fields(args)?)?;
    Ok(match checked(args)? {
        Some(checked) => task.with_fingerprint(document.fingerprint(&checked)?),
        None => task,
    })
}

/// The words of a command as one JSON document. A program that is named by a relative path is another one in another
/// folder: its path stands here in full.
fn words(command: &[OsString]) -> Result<Vec<u8>> {
    let mut command = command.to_vec();
    if let Some(program) = command.first_mut()
        && program.as_encoded_bytes().contains(&b'/')
    {
        let path = std::path::absolute(&*program).map_err(|error| {
            Trouble::usage(
                format!("command `{}`: its folder is not known: {error}", program.display()),
                "call from a folder that exists, or name the command by its absolute path",
            )
        })?;
        *program = path.into_os_string();
    }
    let mut words = Vec::with_capacity(command.len());
    for (at, word) in command.iter().enumerate() {
        words.push(word.to_str().ok_or_else(|| {
            Trouble::new(
                Code::of(ErrorKind::NoJsonForm),
                ErrorKind::NoJsonForm.name(),
                format!("word {at} of the command is not UTF-8, so that the command has no fingerprint"),
                "pass such bytes in a file, or use `--input` for the identity",
            )
        })?);
    }
    Ok(serde_json::to_vec(&words).expect("a list of strings has a JSON form"))
}

fn fields(args: &InputArgs) -> Result<Fields> {
    if args.include.is_empty() && args.optional.is_empty() {
        return Ok(Fields::all());
    }
    Ok(Fields::new(&args.include)?.optional(&args.optional)?)
}

/// The fields that must not change under one key: those that make it, and those of `--fingerprint`. `None`: just those
/// that make it.
fn checked(args: &InputArgs) -> Result<Option<Fields>> {
    if args.fingerprint.is_empty() {
        return Ok(None);
    }
    if args.include.is_empty() && args.optional.is_empty() {
        return Err(Trouble::usage(
            "the whole input makes the key, so that nothing else can change under it",
            "choose the fields that make the key with `--include`",
        ));
    }
    let chosen = |pointer: &String| args.include.contains(pointer) || args.optional.contains(pointer);
    let more = args.fingerprint.iter().filter(|pointer| !chosen(pointer));
    Ok(Some(Fields::new(args.include.iter().chain(more))?.optional(&args.optional)?))
}

/// The bytes of `--input`.
pub(crate) fn read(from: &OsStr) -> Result<Vec<u8>> {
    let failed =
        |error: io::Error| Trouble::usage(format!("{}: {error}", name(from)), "name a readable file, or `-` for stdin");
    let mut bytes = Vec::new();
    let read = if from == "-" {
        io::stdin().lock().take(INPUT_MAX + 1).read_to_end(&mut bytes)
    } else {
        File::open(from).map_err(failed)?.take(INPUT_MAX + 1).read_to_end(&mut bytes)
    };
    if read.map_err(failed)? as u64 > INPUT_MAX {
        return Err(Trouble::usage(format!("{} is larger than 1 GiB", name(from)), "pass the large part in a file"));
    }
    Ok(bytes)
}

/// Reads the document; an error names the file.
fn document<'a>(from: &OsStr, bytes: &'a [u8]) -> Result<Input<'a>> {
    Input::from_json(bytes).map_err(|error| {
        Trouble::new(Code::of(error.kind()), error.kind().name(), format!("{}: {error}", name(from)), error.hint())
    })
}

fn name(from: &OsStr) -> String {
    if from == "-" { "stdin".to_owned() } else { format!("file `{}`", from.display()) }
}
