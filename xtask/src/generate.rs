//! Files that are generated from the code. The OpenAPI document is committed, and must match the
//! code. Man pages and completions are in `target`, from which packages take them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::workspace::{self, Build};

/// Whether to write files, or to compare them with the existing ones.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Write nothing; fail if the existing files differ
    #[arg(long)]
    check: bool,
}

const OPENAPI: &str = "docs/openapi.json";

/// Shells, each with the file name under which it looks for completions.
const SHELLS: [(&str, &str); 3] = [("bash", "gpushctl"), ("zsh", "_gpushctl"), ("fish", "gpushctl.fish")];

/// The unit test of gpushd that generates the OpenAPI document. An environment variable (below)
/// makes the test write the file.
const OPENAPI_TEST: &str = "serve::http::openapi::tests::committed_description_matches_the_code";
const WRITE_OPENAPI: &str = "GPUSH_WRITE_OPENAPI";

/// Runs `cargo xtask openapi`.
pub(crate) fn openapi(arguments: &Arguments) -> Result<String> {
    let mut command = workspace::cargo();
    // Build all packages. Dependencies then have the same features as in `cargo xtask test`.
    command.args(["test", "--quiet", "--locked", "--workspace", "--bin", "gpushd", "--", "--exact", OPENAPI_TEST]);
    if !arguments.check {
        command.env(WRITE_OPENAPI, "1");
    }
    if !output(&mut command)?.contains("1 passed") {
        bail!("gpushd has no test {OPENAPI_TEST}");
    }
    Ok(format!("{OPENAPI} {}", if arguments.check { "matches the code" } else { "is written" }))
}

/// Runs `cargo xtask completions`.
pub(crate) fn completions(arguments: &Arguments) -> Result<String> {
    completions_of(&build_programs()?, arguments.check)
}

/// Runs `cargo xtask man`.
pub(crate) fn man(arguments: &Arguments) -> Result<String> {
    man_of(&build_programs()?, arguments.check)
}

/// Generates the files that are not committed. `programs` is the folder with the programs.
///
/// # Errors
/// If a program fails, or a file cannot be written.
pub(crate) fn make_all(programs: &Path) -> Result<String> {
    Ok(format!("{}\n{}", man_of(programs, false)?, completions_of(programs, false)?))
}

/// Builds the programs that have man pages and returns their folder.
fn build_programs() -> Result<PathBuf> {
    let mut build = workspace::cargo();
    build.args(["build", "--quiet", "--locked"]);
    for package in ["gpushd", "gpushctl", "gpush-sim"] {
        build.args(["--package", package]);
    }
    if !build.status().context("cannot start cargo")?.success() {
        bail!("gpushd, gpushctl or gpush-sim does not build");
    }
    Ok(Build::Debug.folder())
}

fn completions_of(programs: &Path, check: bool) -> Result<String> {
    let folder = workspace::target().join("completions");
    let mut files = Vec::new();
    for (shell, file) in SHELLS {
        let mut gpushctl = Command::new(programs.join("gpushctl"));
        files.push((file.to_owned(), output(gpushctl.args(["completions", shell]))?));
    }
    write_or_compare(&folder, &files, check, "completions")
}

fn man_of(programs: &Path, check: bool) -> Result<String> {
    let mut files = pages_of(programs, "gpushctl")?;
    files.push(("gpushd.8".to_owned(), output(Command::new(programs.join("gpushd")).arg("man"))?));
    let example = workspace::root().join("config.example.toml");
    let example = fs::read_to_string(&example).with_context(|| format!("cannot read {}", example.display()))?;
    files.push(("gpush-config.5".to_owned(), config_page(&example)));
    files.sort();
    let simulator = pages_of(programs, "gpush-sim")?;
    let target = workspace::target();
    Ok([
        write_or_compare(&target.join("man"), &files, check, "man")?,
        write_or_compare(&target.join("man-sim"), &simulator, check, "man")?,
    ]
    .join("\n"))
}

/// Returns the man pages of a program and its commands, with their file names.
fn pages_of(programs: &Path, program: &str) -> Result<Vec<(String, String)>> {
    let fresh = tempfile::tempdir().context("no temporary folder")?;
    output(Command::new(programs.join(program)).arg("man").arg(fresh.path()))?;
    let mut files = Vec::new();
    for entry in fs::read_dir(fresh.path())? {
        let entry = entry?;
        files.push((entry.file_name().to_string_lossy().into_owned(), fs::read_to_string(entry.path())?));
    }
    if files.is_empty() {
        bail!("{program} wrote no man page");
    }
    files.sort();
    Ok(files)
}

/// Returns the man page gpush-config(5). Its main part is the example config, which has every key
/// with its default and a description.
fn config_page(example: &str) -> String {
    let escaped = |line: &str| {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        // troff reads a line that begins with one of these characters as a request.
        if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
    };
    let config: String = example.lines().map(|line| escaped(line) + "\n").collect();
    format!(
        ".TH gpush-config 5 \"\" \"gpush {version}\" gpush\n.SH NAME\ngpush\\-config \\- config of gpushd\n\
         .SH DESCRIPTION\nThe config is a TOML file. It contains settings of gpushd, and rules: each rule says how gpushd manages \
         its GPUs. The package installs the following file, which has every key with its default.\n\
         .SH CONFIG\n.nf\n{config}.fi\n.SH FILES\n.TP\n/etc/gpush/config.toml\nThe config. If this file does not exist, \
         gpushd manages no GPU.\n.TP\n/usr/share/doc/gpush/docs/config.md\nThe reference. In messages and in the config, it has the name \
         docs/config.md.\n.SH \"SEE ALSO\"\ngpushd(8), gpushctl\\-config(1), gpushctl\\-config\\-check(1)\n",
        version = env!("CARGO_PKG_VERSION"),
    )
}

fn output(command: &mut Command) -> Result<String> {
    let printed = command.stdin(Stdio::null()).output();
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    let line = format!("`{} {}`", command.get_program().to_string_lossy(), words.join(" "));
    let printed = printed.with_context(|| format!("cannot run {line}"))?;
    if !printed.status.success() {
        bail!("{line} failed ({}) {}", printed.status, String::from_utf8_lossy(&printed.stderr).trim());
    }
    let text = String::from_utf8(printed.stdout).with_context(|| format!("{line} printed no UTF-8"))?;
    Ok(if text.is_empty() || text.ends_with('\n') { text } else { format!("{text}\n") })
}

fn write_or_compare(folder: &Path, files: &[(String, String)], check: bool, task: &str) -> Result<String> {
    let shown = folder.strip_prefix(workspace::root()).unwrap_or(folder).display();
    if check {
        for (name, made) in files {
            let there = fs::read_to_string(folder.join(name)).unwrap_or_default();
            if there != *made {
                bail!("{shown}/{name} is out of date: `cargo xtask {task}` writes it");
            }
        }
        return Ok(format!("{shown}: {} files are what the code says", files.len()));
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {shown}"))?;
    for (name, made) in files {
        fs::write(folder.join(name), made).with_context(|| format!("cannot write {shown}/{name}"))?;
    }
    Ok(format!("{shown}: {} files written", files.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_page_escapes_what_troff_would_interpret() {
        let page = config_page(".driver\n# a-b \\n\n");
        assert!(page.contains(".nf\n\\&.driver\n# a\\-b \\en\n.fi\n"), "{page}");
    }

    #[test]
    fn drift_of_a_generated_file_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let files = vec![("a.1".to_owned(), "one\n".to_owned())];
        assert!(write_or_compare(folder.path(), &files, true, "man").is_err());
        write_or_compare(folder.path(), &files, false, "man").unwrap();
        assert!(write_or_compare(folder.path(), &files, true, "man").is_ok());
        let other = vec![("a.1".to_owned(), "two\n".to_owned())];
        assert!(
            write_or_compare(folder.path(), &other, true, "man").unwrap_err().to_string().contains("cargo xtask man")
        );
    }
}
