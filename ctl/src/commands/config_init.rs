//! `gpushctl config init`: writes a config to begin with.

use std::{fs::OpenOptions, io::Write as _, os::unix::fs::OpenOptionsExt as _, path::Path};

use clap::{ValueEnum as _, builder::PossibleValue};
use gpush_api::{ApiError, Code, Driver, Gpu};
use gpush_core::{
    config::{Config, Isolation, Site, Starter},
    desired::KnownHost,
};
use serde::Serialize;

use crate::{
    args::{ConfigInitArgs, Global, IsolationName, SiteName, typed::command_line},
    exit::{self, Failure, Outcome},
    offline,
    output::Output,
};

/// The output of `gpushctl config init --json`.
#[derive(Debug, Serialize)]
pub(super) struct Initialized<'t> {
    pub(super) file: Option<&'t Path>,
    pub(super) text: &'t str,
}

pub(super) fn run(global: &Global, args: &ConfigInitArgs, out: &Output) -> Outcome {
    let (gpus, driver) = host(global, args)?;
    if gpus.is_empty() {
        return Err(super::no_gpu().into());
    }
    let site = match args.site {
        Some(site) => site,
        None if out.can_ask() => asked(out)?,
        None => {
            let error = ApiError::new(Code::BadRequest, "the config needs to know what the host is for");
            return Err(error.hint("add `--site lab`, `--site slurm` or `--site inference`").into());
        }
    };
    let isolation = match args.isolation {
        IsolationName::Hard => Isolation::Hard,
        IsolationName::Shared => Isolation::Shared,
    };
    let site = match site {
        SiteName::Lab => Site::Lab,
        SiteName::Slurm => Site::Slurm,
        SiteName::Inference => Site::Inference,
    };
    if site != Site::Lab && !args.groups.is_empty() {
        let error = ApiError::new(Code::BadRequest, "`--group` is for `--site lab` only");
        return Err(error.hint("leave out `--group`: Slurm and services decide who uses the GPUs").into());
    }
    let text = Starter { site, isolation, groups: args.groups.clone() }
        .config(KnownHost { gpus: &gpus, driver: driver.as_ref() });
    // Only the names of groups can make the config invalid.
    Config::parse(&text, "config.toml").map_err(|errors| {
        let error = ApiError::new(Code::BadRequest, "`--group` takes the name of one group of this host");
        error.cause(errors.to_string())
    })?;
    if let Some(file) = &args.file {
        write(file, &text)?;
        let path = file.display().to_string();
        let next =
            command_line(["gpushctl", "config", "check", &path]).unwrap_or_else(|| "gpushctl config check".to_owned());
        return out
            .show(&Initialized { file: Some(file), text: &text }, |look| {
                format!(
                    "written to {}; check it with `{}`\n",
                    look.clean(&file.display().to_string()),
                    look.clean(&next)
                )
            })
            .map(|()| 0);
    }
    out.show(&Initialized { file: None, text: &text }, |_| text.clone())?;
    Ok(0)
}

/// Returns the GPUs for which the config is: those of a preset or a saved host, else those of gpushd, with the driver.
fn host(global: &Global, args: &ConfigInitArgs) -> Result<(Vec<Gpu>, Option<Driver>), Failure> {
    match &args.offline {
        Some(host) => Ok((offline::host(host)?, None)),
        None => super::with_agent(global, async |client| {
            let gpus = client.gpus(true).await.map_err(|error| {
                let error = ApiError::from(error);
                Failure::from(if error.code == Code::Unreachable { error.hint(offline_hint(args)) } else { error })
            })?;
            Ok((gpus, client.version().await?.driver))
        }),
    }
}

/// Returns the hint for a host without gpushd: the typed command with a preset.
fn offline_hint(args: &ConfigInitArgs) -> String {
    let site = args.site.unwrap_or(SiteName::Lab).to_possible_value();
    let site = site.as_ref().map_or("lab", PossibleValue::get_name);
    let isolation = match args.isolation {
        IsolationName::Hard => "",
        IsolationName::Shared => " --isolation shared",
    };
    let line = ["gpushctl config init", "--site", site].join(" ");
    format!("without gpushd, name a similar host: `{line}{isolation} --offline dgx-a100`")
}

/// Asks what the host is for.
fn asked(out: &Output) -> Result<SiteName, Failure> {
    for (site, question) in [
        (SiteName::Lab, "Do users log in to this host and share its GPUs?"),
        (SiteName::Slurm, "Does Slurm start jobs on this host?"),
        (SiteName::Inference, "Do services run on its GPUs?"),
    ] {
        if out.confirmed(question)? {
            return Ok(site);
        }
    }
    let error = ApiError::new(Code::BadRequest, "gpushctl has a config for each of these uses only");
    Err(error.hint("begin with `--site lab`, and change the rules; docs/config.md explains them").into())
}

/// Writes a new file. Never overwrites a file.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path);
    let written = opened.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            ApiError::new(Code::BadRequest, format!("{} exists, and is not overwritten", path.display()))
                .hint("name another file, or leave out --file to print the config")
                .into()
        }
        _ => exit::io(format!("cannot write {}", path.display()), &error).into(),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command, Config};

    /// Fault: the hint for `config init --site slurm` named `--site lab`.
    #[test]
    fn hint_without_gpushd_keeps_the_typed_site() {
        let hint = |line: &str| match Cli::try_parse_from(line.split(' ')).unwrap().command {
            Command::Config(Config::Init(args)) => offline_hint(&args),
            other => panic!("{other:?}"),
        };
        for (typed, command) in [
            ("gpushctl config init", "gpushctl config init --site lab --offline dgx-a100"),
            ("gpushctl config init --site slurm", "gpushctl config init --site slurm --offline dgx-a100"),
            (
                "gpushctl config init --site inference --isolation shared",
                "gpushctl config init --site inference --isolation shared --offline dgx-a100",
            ),
        ] {
            assert!(hint(typed).ends_with(&format!("`{command}`")), "{typed}: {}", hint(typed));
        }
    }
}
