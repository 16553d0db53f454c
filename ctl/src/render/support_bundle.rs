//! The list of the files in a support bundle, which is shown before gpushctl writes the bundle.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::appearance::{Appearance, count, pad};

/// The list of a bundle's files. The archive contains this document as `bundle.json`. It is also
/// the output of `--json`, where `file` is set.
#[derive(Debug, Serialize)]
pub(crate) struct Contents {
    /// Path of the archive that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<PathBuf>,
    /// Version of gpushctl.
    pub(crate) gpushctl: &'static str,
    /// Time at which the bundle was collected.
    pub(crate) collected_at: jiff::Timestamp,
    /// The files of the archive.
    pub(crate) files: Vec<BundleFile>,
    /// Files that could not be collected.
    pub(crate) missing: Vec<MissingPart>,
}

/// A file of the archive.
#[derive(Debug, Serialize)]
pub(crate) struct BundleFile {
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    /// Why the bundle contains this file.
    pub(crate) why: &'static str,
    /// The content of the file.
    #[serde(skip)]
    pub(crate) data: Vec<u8>,
}

/// A file that could not be collected.
#[derive(Debug, Serialize)]
pub(crate) struct MissingPart {
    pub(crate) name: &'static str,
    pub(crate) why: &'static str,
    pub(crate) reason: String,
}

/// Width of the column with the size of a file, such as `1023.9 KiB`.
const SIZE: usize = 10;

/// Lists the files with their sizes, and why the bundle contains them. Then lists the files that
/// are missing.
pub(crate) fn list(contents: &Contents, path: &Path, look: &Appearance) -> String {
    let mut lines = vec![format!("{} will contain:", look.clean(&path.display().to_string()))];
    let names = contents.files.iter().map(|file| file.name).chain(contents.missing.iter().map(|part| part.name));
    let columns = names.map(str::len).max().unwrap_or_default();
    for file in &contents.files {
        lines.push(format!("  {}  {:>SIZE$}  {}", pad(file.name, columns), size(file.bytes), file.why));
    }
    for part in &contents.missing {
        let first = format!("  {}  {:>SIZE$}  ", pad(part.name, columns), "missing");
        lines.extend(look.wrap(&first, &look.clean(&part.reason)));
    }
    lines.push(
        "User names, command lines and reasons are left out. bundle.json in the archive has this list.".to_owned(),
    );
    lines.join("\n") + "\n"
}

/// Says to which file the bundle was written.
pub(crate) fn written(contents: &Contents, bytes: usize, look: &Appearance) -> String {
    let path = contents.file.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let files = count(contents.files.len() + 1, "file");
    format!("Wrote {} ({}, {files}). Read it before you send it.\n", look.clean(&path), size(bytes))
}

/// Returns a size in bytes or KiB.
fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        _ => format!("{}.{} KiB", bytes / 1024, bytes % 1024 * 10 / 1024),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_bytes_or_kib() {
        assert_eq!(
            [size(0), size(1023), size(1024), size(1535), size(3 << 20)],
            ["0 B", "1023 B", "1.0 KiB", "1.4 KiB", "3072.0 KiB"]
        );
    }
}
