//! `gpushctl support-bundle`: one archive for a bug report.
//!
//! | file | subject |
//! |---|---|
//! | `collect` | the parts of the bundle: what gpushd answers, and files and programs of the host |
//! | `allowed` | the values of a document that the bundle contains |
//! | `archive` | the tar file |
//!
//! The command first collects the whole bundle in memory, and then shows the list of files. So the
//! list is exact, and the command writes nothing before the user agrees.

mod allowed;
mod archive;
mod collect;

use std::path::PathBuf;

use gpush_api::{ApiError, Code};
use serde::Serialize;

use self::collect::{Content, Part};
use crate::{
    args::{Global, SupportBundleArgs},
    exit::Outcome,
    output::Output,
    render::support_bundle::{self as render, BundleFile, Contents, MissingPart},
};

pub(super) fn run(global: &Global, args: &SupportBundleArgs, out: &Output) -> Outcome {
    let now = jiff::Timestamp::now();
    let name = format!("gpush-support-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = args.file.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    archive::check_absent(&path)?;
    let mut contents = files(collect::all(global, out)?, gpush_api::whole_second(now))?;
    if !out.json {
        out.text(&render::list(&contents, &path, &out.look))?;
        if !args.yes && out.can_ask() && !out.confirmed("Write the file?")? {
            out.remark("Nothing was written.\n");
            return Ok(1);
        }
    }
    let manifest = json(&contents)?;
    let listed = contents.files.iter().map(|file| (file.name, file.data.as_slice()));
    let files = std::iter::once(("bundle.json", manifest.as_slice())).chain(listed);
    let time = u64::try_from(now.as_second()).unwrap_or_default();
    let bytes = archive::pack(&name, files, time)
        .map_err(|error| crate::exit::io(format!("cannot pack {}", path.display()), &error))?;
    archive::write(&path, &bytes)?;
    contents.file = Some(path);
    out.show(&contents, |look| render::written(&contents, bytes.len(), look))?;
    Ok(0)
}

/// Returns the files of the bundle with the allowed values, and the files that are missing.
fn files(parts: Vec<Part>, collected_at: jiff::Timestamp) -> Result<Contents, ApiError> {
    let gpushctl = env!("CARGO_PKG_VERSION");
    let mut contents = Contents { file: None, gpushctl, collected_at, files: Vec::new(), missing: Vec::new() };
    for Part { name, why, content } in parts {
        let data = match content {
            Ok(Content::Document(mut document)) => {
                allowed::document(&mut document);
                json(&document)?
            }
            Ok(Content::Log(entries)) => json(&entries)?,
            Ok(Content::Text(text)) => text.into_bytes(),
            Err(reason) => {
                contents.missing.push(MissingPart { name, why, reason });
                continue;
            }
        };
        contents.files.push(BundleFile { name, bytes: data.len(), why, data });
    }
    Ok(contents)
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, ApiError> {
    let written = serde_json::to_vec_pretty(value);
    written.map_err(|error| ApiError::new(Code::Internal, "cannot write the bundle as JSON").cause(error.to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn missing_parts_are_named_and_not_files() {
        let parts = vec![
            Part { name: "a.json", why: "one", content: Ok(Content::Document(json!({"user": "bob", "uid": 1000}))) },
            Part { name: "b.txt", why: "two", content: Err("no answer".to_owned()) },
        ];
        let contents = files(parts, jiff::Timestamp::UNIX_EPOCH).unwrap();
        let [file] = &contents.files[..] else { panic!("{contents:?}") };
        assert_eq!((file.name, file.bytes), ("a.json", file.data.len()));
        assert!(!String::from_utf8_lossy(&file.data).contains("bob"));
        let [missing] = &contents.missing[..] else { panic!("{contents:?}") };
        assert_eq!((missing.name, missing.reason.as_str()), ("b.txt", "no answer"));
    }
}
