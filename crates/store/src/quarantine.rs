//! Sets a damaged database aside: renames it and keeps it for inspection. gpushd never reads it
//! again.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;

/// Maximum number of set-aside databases that gpushd keeps. Older set-aside databases are deleted,
/// so that a faulty disk does not also become full.
const KEPT: usize = 5;

/// Suffixes of the files that SQLite keeps next to a database.
pub(crate) const COMPANIONS: [&str; 3] = ["-wal", "-shm", "-journal"];

/// Renames the database and its other files, and returns the new path. If there is no database, renames the other files
/// and returns `None`.
pub(crate) fn set_aside(database: &Path, now: Timestamp) -> io::Result<Option<PathBuf>> {
    let directory = database.parent().unwrap_or(Path::new("."));
    let name = database.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stem = format!("{name}.damaged-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let free = |candidate: &String| !directory.join(candidate).exists();
    let mut target = stem.clone();
    // The name is already used if gpushd set another database aside in the same second, or if the
    // clock was set back.
    let mut number = 1;
    while !free(&target) {
        number += 1;
        target = format!("{stem}.{number}");
    }
    let mut kept = None;
    // Rename the log first. If gpushd is killed before the database is renamed, the next gpushd finds a database
    // without its log, and the watermark shows that commits are missing.
    for companion in COMPANIONS {
        rename(&directory.join(format!("{name}{companion}")), &directory.join(format!("{target}{companion}")))?;
    }
    if rename(database, &directory.join(&target))? {
        kept = Some(directory.join(&target));
    }
    fs::File::open(directory)?.sync_all()?;
    forget_oldest(directory, &format!("{name}.damaged-"));
    Ok(kept)
}

fn rename(from: &Path, to: &Path) -> io::Result<bool> {
    match fs::rename(from, to) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn forget_oldest(directory: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let is_companion = |name: &str| COMPANIONS.iter().any(|companion| name.ends_with(companion));
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(prefix) && !is_companion(name))
        .collect();
    names.sort();
    let excess = names.len().saturating_sub(KEPT);
    for name in &names[..excess] {
        for ending in COMPANIONS.iter().chain(&[""]) {
            let path = directory.join(format!("{name}{ending}"));
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "an old damaged database can't be deleted");
            }
        }
    }
}
