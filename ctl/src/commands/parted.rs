//! `gpushctl mig export|import`, and the mig-parted files of `plan`, `apply` and `assert`.

use std::{os::unix::fs::FileTypeExt, path::Path};

use gpush_api::{ApiError, Code};
use gpush_core::parted::{self, File};
use serde::Serialize;

use crate::{
    args::{Global, Which},
    exit::Outcome,
    offline,
    output::Output,
};

/// What `--json` prints of both.
#[derive(Serialize)]
struct Written<'a> {
    /// YAML or TOML.
    text: &'a str,
    /// What the text does not say.
    remarks: &'a [String],
}

/// Reads a mig-parted file, or stdin for `-`.
pub(super) fn read(path: &Path) -> Result<File, ApiError> {
    // Not what never ends, such as a device; `<(command)` is a pipe.
    if path != Path::new("-")
        && let Ok(of) = std::fs::metadata(path)
        && !(of.is_file() || of.is_dir() || of.file_type().is_fifo())
    {
        let error = ApiError::new(Code::BadRequest, format!("{} is no file", offline::name(path)));
        return Err(error.hint("give the path of a mig-parted file, or - for stdin"));
    }
    // One byte more than is taken: more is then seen as too much, not cut.
    let bytes = offline::read_up_to(path, parted::MOST_BYTES as u64 + 1)?;
    File::from_bytes(&bytes, &offline::name(path)).map_err(|errors| ApiError::from(&errors))
}

pub(super) fn export(global: &Global, which: &Which, label: &str, output: Option<&Path>, out: &Output) -> Outcome {
    if label.trim().is_empty() || label.chars().any(char::is_control) || label.len() > 200 {
        let error = ApiError::new(Code::BadRequest, "a label is a name on one line, of at most 200 bytes");
        return Err(error.hint("--label current").into());
    }
    super::ask(global, async |client| {
        let host = client.gpus(true).await?;
        let chosen = super::select(host.clone(), which)?;
        let chosen: Vec<&str> = chosen.iter().map(|gpu| gpu.uuid.as_str()).collect();
        let exported = parted::export(&host, label, |gpu| chosen.contains(&gpu.uuid.as_str()))?;
        match output {
            Some(path) => {
                std::fs::write(path, &exported.text)
                    .map_err(|e| crate::exit::io(format!("can't write {}", path.display()), &e))?;
                tell(out, "", &exported.remarks)
            }
            None => tell(out, &exported.text, &exported.remarks),
        }
    })
}

pub(super) fn import(path: &Path, label: Option<&str>, out: &Output) -> Outcome {
    let file = read(path)?;
    let label = label.map(|name| file.select(Some(name))).transpose()?;
    let imported = parted::import(&file, label);
    tell(out, &imported.text, &imported.remarks)
}

/// The text on stdout; what it does not say on stderr, where a redirection does not hide it.
fn tell(out: &Output, text: &str, remarks: &[String]) -> Outcome {
    if out.json {
        out.document(&Written { text, remarks })?;
        return Ok(0);
    }
    out.verbatim(text.as_bytes())?;
    for remark in remarks {
        out.remark(&format!("note: {}\n", out.look.clean(remark)));
    }
    Ok(0)
}
