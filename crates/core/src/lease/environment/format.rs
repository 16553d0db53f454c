//! Output formats of an environment.

use std::fmt::Write as _;

use super::Environment;

/// An output format of an environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// POSIX shell, for `eval`: `export NAME='value'` for each variable, and `unset NAME` for each
    /// variable that the environment does not contain.
    Shell,
    /// fish: the same variables as [`Self::Shell`], with `set -gx` and `set -e`.
    Fish,
    /// csh and tcsh: the same variables as [`Self::Shell`], with `setenv` and `unsetenv`.
    Csh,
    /// A JSON object.
    Json,
    /// Arguments of `docker run`, one on each line: the devices, `--env` options, and the mounted
    /// pipe directory.
    Docker,
    /// Lines of Slurm's TaskProlog protocol: `export NAME=value`, `unset NAME`.
    Slurm,
}

/// The output of `gpushctl lease env` in the shell format if the command fails. This output makes
/// `eval` fail too.
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
            // If a csh script evaluates the output of a command, csh replaces the newlines in that
            // output with blanks. So each line of this output ends with a semicolon.
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
            // Docker parses the list of devices as one CSV field, which needs quotes.
            _ = writeln!(text, "--gpus\n\"device={}\"", devices.join(","));
            for (name, value) in variables {
                // Omit CUDA_VISIBLE_DEVICES, because the container runtime gives new numbers to the
                // devices.
                if name != "CUDA_VISIBLE_DEVICES" {
                    _ = writeln!(text, "--env\n{name}={value}");
                }
            }
            if let Some(mps) = &environment.mps {
                let path = &mps.pipe_directory.0;
                _ = writeln!(text, "--volume\n{path}:{path}");
                // The container needs the host's IPC namespace, because an MPS client and its
                // server share memory.
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
