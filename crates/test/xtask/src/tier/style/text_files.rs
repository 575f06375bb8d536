//! The sources and documents of the repository, which the checks of style read.

use anyhow::{Context, Result};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Paths relative to the root of the repository, and contents.
pub(super) type TextFiles = Vec<(PathBuf, String)>;

/// The sources and documents of the repository at `root`.
///
/// # Errors
/// That one cannot be read.
pub(super) fn read(root: &Path) -> Result<TextFiles> {
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders = ["crates", "docs", "fuzz", "bench"].map(PathBuf::from).to_vec();
    for page in fs::read_dir(root)? {
        let name = PathBuf::from(page?.file_name());
        files.extend(Some(name).filter(|name| name.extension().is_some_and(|e| e == "md")));
    }
    while let Some(folder) = folders.pop() {
        let absolute = root.join(&folder);
        let entries = fs::read_dir(&absolute)
            .with_context(|| format!("cannot read {}", absolute.display()))?;
        for entry in entries {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs" || e == "md") {
                files.push(path);
            }
        }
    }
    let read = |path: PathBuf| {
        let text = fs::read_to_string(root.join(&path));
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        Ok((path, text))
    };
    files.into_iter().map(read).collect()
}
