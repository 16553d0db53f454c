//! `gpushctl mig export|import`, and the mig-parted files of `plan`, `apply` and `assert`.

use std::{os::unix::fs::FileTypeExt, path::Path};

use gpush_api::{ApiError, Code};
use gpush_core::parted::{self, File, InvalidLabels, Label};
use serde::Serialize;

use crate::{args::Global, exit::Outcome, offline, output::Output};

/// The output of `mig export --json` and `mig import --json`.
#[derive(Serialize)]
pub(super) struct Written<'a> {
    /// The YAML or TOML text.
    pub(super) text: &'a str,
    /// Facts that the user must know and that the text does not contain.
    pub(super) remarks: &'a [String],
    /// Why the text does not contain everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<&'a ApiError>,
}

/// Reads a label of a mig-parted file, or of stdin if the path is `-`. Ignores errors in other labels.
pub(super) fn read(path: &Path, label: Option<&str>) -> Result<(File, Label), ApiError> {
    let (file, wrong) =
        File::from_bytes_lenient(&bytes(path)?, &offline::name(path)).map_err(|errors| ApiError::from(&errors))?;
    let concerned = |wrong: &InvalidLabels| label.is_none_or(|name| wrong.labels.iter().any(|label| label == name));
    if let Some(wrong) = wrong.filter(concerned) {
        return Err(ApiError::from(&wrong.errors));
    }
    let label = file.select(label)?.clone();
    Ok((file, label))
}

fn bytes(path: &Path) -> Result<Vec<u8>, ApiError> {
    // Refuse a file that may never end, such as a device. A pipe is permitted, for `<(command)`.
    if path != Path::new("-")
        && let Ok(of) = std::fs::metadata(path)
        && !(of.is_file() || of.is_dir() || of.file_type().is_fifo())
    {
        let error = ApiError::new(Code::BadRequest, format!("{} is not a file", offline::name(path)));
        return Err(error.hint("give the path of a mig-parted file, or - for stdin"));
    }
    // Read one byte more than permitted, so that a file that is too large causes an error.
    offline::read_up_to(path, parted::MOST_BYTES as u64 + 1)
}

pub(super) fn export(
    global: &Global,
    selectors: &[String],
    label: &str,
    output: Option<&Path>,
    out: &Output,
) -> Outcome {
    if label.trim().is_empty() || label.chars().any(char::is_control) || label.len() > 200 {
        let error = ApiError::new(Code::BadRequest, "a label must be a name on one line, of at most 200 bytes");
        return Err(error.hint("leave out --label, or write --label current").into());
    }
    super::ask(global, async |client| {
        let host = client.gpus(true).await?;
        let chosen = super::select_of(client, host.clone(), selectors).await?;
        let chosen: Vec<&str> = chosen.iter().map(|gpu| gpu.uuid.as_str()).collect();
        let exported = parted::export(&host, label, |gpu| chosen.contains(&gpu.uuid.as_str()))?;
        match output {
            Some(path) => {
                std::fs::write(path, &exported.text)
                    .map_err(|e| crate::exit::io(format!("can't write {}", path.display()), &e))?;
                tell(out, "", &exported.remarks, None)
            }
            None => tell(out, &exported.text, &exported.remarks, None),
        }
    })
}

/// Converts a mig-parted file. If one label has errors, still converts the others.
pub(super) fn import(path: &Path, label: Option<&str>, out: &Output) -> Outcome {
    let Some(name) = label else {
        let (file, wrong) =
            File::from_bytes_lenient(&bytes(path)?, &offline::name(path)).map_err(|errors| ApiError::from(&errors))?;
        let imported = parted::import(&file, None);
        return tell(out, &imported.text, &imported.remarks, wrong.as_ref().map(ApiError::from).as_ref());
    };
    let (file, label) = read(path, Some(name))?;
    let imported = parted::import(&file, Some(&label));
    tell(out, &imported.text, &imported.remarks, None)
}

/// Prints the text on stdout. Prints remarks and the error on stderr, so that the user sees them even if stdout is
/// redirected.
fn tell(out: &Output, text: &str, remarks: &[String], error: Option<&ApiError>) -> Outcome {
    let status = error.map_or(0, |error| error.code.exit_status());
    if out.json {
        out.document(&Written { text, remarks, error })?;
        return Ok(status);
    }
    out.verbatim(text.as_bytes())?;
    for remark in remarks {
        out.remark(&format!("note: {}\n", out.look.clean(remark)));
    }
    error.into_iter().for_each(|error| out.error(error));
    Ok(status)
}
