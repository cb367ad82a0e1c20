//! What the checks know of the workspace: its root, its files as git sees them, and cargo's metadata.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::process;

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

/// Every file that is committed, or could be: neither ignored nor deleted. Paths are relative to `root`.
pub(crate) fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut command = Command::new("git");
    command.current_dir(root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let listed = process::stdout_of(command).context("the checks read the tree through git: use a git checkout")?;
    let mut files: Vec<PathBuf> = listed.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
    files.retain(|file| root.join(file).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}

/// The texts of the tree, by their path with `/` between its parts.
pub(crate) type Texts = BTreeMap<String, String>;

/// Every file of the tree that is text.
pub(crate) fn texts(root: &Path) -> Result<Texts> {
    let mut texts = Texts::new();
    for file in files(root)? {
        let bytes = std::fs::read(root.join(&file)).with_context(|| format!("cannot read {}", file.display()))?;
        if let Ok(text) = String::from_utf8(bytes) {
            texts.insert(file.to_string_lossy().replace('\\', "/"), text);
        }
    }
    Ok(texts)
}

/// `cargo metadata`, with the whole resolved graph.
pub(crate) fn metadata(root: &Path) -> Result<Value> {
    let mut command = process::cargo();
    command.current_dir(root).args(["metadata", "--format-version", "1", "--locked"]);
    serde_json::from_str(&process::stdout_of(command)?).context("cargo metadata is not JSON")
}

/// `cargo metadata` of our own packages, which it has at once.
pub(crate) fn packages(root: &Path) -> Result<Value> {
    let mut command = process::cargo();
    command.current_dir(root).args(["metadata", "--format-version", "1", "--locked", "--no-deps"]);
    serde_json::from_str(&process::stdout_of(command)?).context("cargo metadata is not JSON")
}

/// The folder that cargo builds into.
pub(crate) fn target_folder(root: &Path) -> Result<PathBuf> {
    Ok(PathBuf::from(text(&packages(root)?["target_directory"])))
}

/// A JSON string, or nothing.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A JSON list, or nothing.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}
