//! Setting a damaged database aside: nothing of it is read again, nothing of it is thrown away.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;

/// Databases set aside that are kept; the oldest beyond are deleted, so that a disk that damages
/// files is not filled up by them too.
const KEPT: usize = 5;

/// File names beside a database that belong to it.
pub(crate) const COMPANIONS: [&str; 3] = ["-wal", "-shm", "-journal"];

/// Renames the database and what belongs to it; where it is now. `None` when there is none (then
/// what is left of it is moved all the same).
pub(crate) fn set_aside(database: &Path, now: Timestamp) -> io::Result<Option<PathBuf>> {
    let directory = database.parent().unwrap_or(Path::new("."));
    let name = database.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stem = format!("{name}.damaged-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let free = |candidate: &String| !directory.join(candidate).exists();
    let mut target = stem.clone();
    // At most one in a second, but for a clock that was set back.
    let mut number = 1;
    while !free(&target) {
        number += 1;
        target = format!("{stem}.{number}");
    }
    let mut kept = None;
    // The log first: a database that is found without it is found to be behind its watermark.
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
