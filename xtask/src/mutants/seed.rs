//! Takes into one build folder what cargo has compiled of other people's packages in another, so that nobody compiles it
//! twice. Packages of ours are not taken: cargo knows them by their paths, which differ from copy to copy of the tree.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::Path;

use anyhow::Result;

/// Takes what `to` lacks and cargo has finished in `from`, both folders of one profile such as `debug`; says how many units that were.
///
/// Cargo still judges each of them by itself, and compiles what does not fit. The folders are laid out as cargo
/// does it, which it does not promise: were it to change, nothing would be taken, and the build would only be slower.
pub(crate) fn take(from: &Path, to: &Path, ours: &BTreeSet<&str>) -> Result<usize> {
    let mut hashes = HashSet::new();
    for unit in names(&from.join(".fingerprint")) {
        let Some((package, hash)) = unit.rsplit_once('-') else { continue };
        let (print, copy) = (from.join(".fingerprint").join(&unit), to.join(".fingerprint").join(&unit));
        if ours.contains(package) || copy.exists() || !is_finished(&print) {
            continue;
        }
        let build = from.join("build").join(&unit);
        if build.is_dir() {
            link_folder(&build, &to.join("build").join(&unit))?;
        }
        // Copied, not linked: cargo writes into these when it judges a unit stale.
        fs::create_dir_all(&copy)?;
        for name in names(&print) {
            copy_with_time(&print.join(&name), &copy.join(&name))?;
        }
        hashes.insert(hash.to_owned());
    }
    fs::create_dir_all(to.join("deps"))?;
    for name in names(&from.join("deps")) {
        let hash = name.rsplit_once('-').map(|(_, end)| end.split('.').next().unwrap_or_default());
        if hash.is_some_and(|hash| hashes.contains(hash)) {
            link(&from.join("deps").join(&name), &to.join("deps").join(&name))?;
        }
    }
    Ok(hashes.len())
}

/// Cargo describes a unit in a file `….json` once it is compiled.
fn is_finished(print: &Path) -> bool {
    names(print).iter().any(|name| Path::new(name).extension() == Some(OsStr::new("json")))
}

/// What a folder holds; nothing where there is no folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn link_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for name in names(from) {
        let (file, copy) = (from.join(&name), to.join(&name));
        if file.is_dir() { link_folder(&file, &copy)? } else { link(&file, &copy)? }
    }
    Ok(())
}

/// A second name for a file; a copy where the disk has no such thing.
fn link(from: &Path, to: &Path) -> Result<()> {
    if to.exists() || fs::hard_link(from, to).is_ok() { Ok(()) } else { copy_with_time(from, to) }
}

/// Cargo judges by the times of files, so a copy has that of its original.
fn copy_with_time(from: &Path, to: &Path) -> Result<()> {
    let time = fs::metadata(from)?.modified()?;
    fs::copy(from, to)?;
    Ok(File::options().append(true).open(to)?.set_modified(time)?)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    /// Writes a file, an hour old, and the folders above it.
    fn write(folder: &Path, file: &str) {
        let file = folder.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "compiled").unwrap();
        let hour = SystemTime::now() - Duration::from_secs(3600);
        File::options().append(true).open(&file).unwrap().set_modified(hour).unwrap();
    }

    #[test]
    fn finished_units_of_others_are_taken_once_with_their_times() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        for file in [
            ".fingerprint/serde-1a/lib-serde",
            ".fingerprint/serde-1a/lib-serde.json",
            ".fingerprint/our-core-2b/lib-our_core.json",
            ".fingerprint/tokio-3c/invoked.timestamp",
            ".fingerprint/ring-4d/run-build-script-build-script-build.json",
            "build/ring-4d/out/libring.a",
            "deps/libserde-1a.rlib",
            "deps/libour_core-2b.rlib",
            "deps/libtokio-3c.rmeta",
        ] {
            write(&from, file);
        }
        let ours = BTreeSet::from(["our-core"]);
        assert_eq!(take(&from, &to, &ours).unwrap(), 2);
        let time = |folder: &Path, file: &str| fs::metadata(folder.join(file)).unwrap().modified().unwrap();
        for file in [".fingerprint/serde-1a/lib-serde", "deps/libserde-1a.rlib", "build/ring-4d/out/libring.a"] {
            assert_eq!(time(&from, file), time(&to, file), "{file}");
        }
        for file in
            [".fingerprint/our-core-2b", "deps/libour_core-2b.rlib", ".fingerprint/tokio-3c", "deps/libtokio-3c.rmeta"]
        {
            assert!(!to.join(file).exists(), "{file}");
        }
        fs::write(to.join(".fingerprint/serde-1a/lib-serde"), "judged").unwrap();
        assert_eq!(fs::read_to_string(from.join(".fingerprint/serde-1a/lib-serde")).unwrap(), "compiled");
        assert_eq!(take(&from, &to, &ours).unwrap(), 0);
    }

    #[test]
    fn of_a_folder_that_is_not_there_nothing_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(take(&folder.path().join("none"), &folder.path().join("to"), &BTreeSet::new()).unwrap(), 0);
    }
}
