//! Formats of an environment.

use std::fmt::Write as _;

use super::Environment;

/// Formats that an environment is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// `export NAME='value'` lines for `eval` in a POSIX shell; `unset` for what does not apply.
    Shell,
    /// The same for fish: `set -gx`, `set -e`.
    Fish,
    /// The same for csh and tcsh: `setenv`, `unsetenv`.
    Csh,
    /// An object.
    Json,
    /// Arguments of `docker run`, one on each line: devices, `--env` and the mounted pipe directory.
    Docker,
    /// Lines of Slurm's TaskProlog protocol: `export NAME=value`, `unset NAME`.
    Slurm,
}

/// What `gpushctl lease env` prints in the shell format when it fails, so that `eval` fails too.
pub const SHELL_FAILURE: &str = "false\n";

pub(super) fn text(environment: &Environment, format: Format) -> String {
    let variables = environment.variables();
    let mut text = String::new();
    match format {
        Format::Shell => {
            for name in environment.unset() {
                _ = writeln!(text, "unset {name}");
            }
            for (name, value) in variables {
                _ = writeln!(text, "export {name}='{value}'");
            }
        }
        Format::Fish => {
            for name in environment.unset() {
                _ = writeln!(text, "set -e {name}");
            }
            for (name, value) in variables {
                _ = writeln!(text, "set -gx {name} '{value}'");
            }
        }
        Format::Csh => {
            // csh replaces the newlines of a command substitution with blanks.
            for name in environment.unset() {
                _ = writeln!(text, "unsetenv {name};");
            }
            for (name, value) in variables {
                _ = writeln!(text, "setenv {name} '{value}';");
            }
        }
        Format::Json => {
            let object: serde_json::Map<String, serde_json::Value> =
                variables.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
            _ = writeln!(text, "{}", serde_json::Value::Object(object));
        }
        Format::Docker => {
            let devices: Vec<&str> = environment.devices.iter().map(super::DeviceUuid::as_str).collect();
            // Docker takes the list of devices as one quoted CSV field.
            _ = writeln!(text, "--gpus\n\"device={}\"", devices.join(","));
            for (name, value) in variables {
                // The container runtime renumbers the devices that it passes.
                if name != "CUDA_VISIBLE_DEVICES" {
                    _ = writeln!(text, "--env\n{name}={value}");
                }
            }
            if let Some(mps) = &environment.mps {
                let path = &mps.pipe_directory.0;
                _ = writeln!(text, "--volume\n{path}:{path}");
                // A client and its server share memory and are identified by pid.
                _ = writeln!(text, "--ipc\nhost");
            }
        }
        Format::Slurm => {
            for name in environment.unset() {
                _ = writeln!(text, "unset {name}");
            }
            for (name, value) in variables {
                _ = writeln!(text, "export {name}={value}");
            }
        }
    }
    text
}
