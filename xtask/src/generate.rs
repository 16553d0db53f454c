//! Files made from the code: the OpenAPI document, which is committed and must not drift, and man
//! pages and completions, which packages take from `target`.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::workspace::{self, Build};

/// Whether to write, or to compare with what is there.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Write nothing; fail when what is there differs
    #[arg(long)]
    check: bool,
}

const OPENAPI: &str = "docs/openapi.json";

/// Shells, with the file name by which each looks its completions up.
const SHELLS: [(&str, &str); 3] = [("bash", "gpushctl"), ("zsh", "_gpushctl"), ("fish", "gpushctl.fish")];

/// `cargo xtask openapi`.
pub(crate) fn openapi(arguments: &Arguments) -> Result<String> {
    let made = made_openapi()?;
    let path = workspace::root().join(OPENAPI);
    if !arguments.check {
        fs::write(&path, made).with_context(|| format!("cannot write {OPENAPI}"))?;
        return Ok(format!("{OPENAPI} is written"));
    }
    let there =
        fs::read_to_string(&path).with_context(|| format!("{OPENAPI} is not there; `cargo xtask openapi` makes it"))?;
    if there != made {
        bail!(
            "{OPENAPI} is not what the code says; `cargo xtask openapi` writes it anew. {}",
            first_difference(&there, &made)
        );
    }
    Ok(format!("{OPENAPI} is what the code says, {} lines", made.lines().count()))
}

fn made_openapi() -> Result<String> {
    let mut command = workspace::cargo();
    command.args(["run", "--quiet", "--locked", "--package", "gpushd", "--features", "openapi", "--", "openapi"]);
    output(command.stderr(Stdio::inherit()))
}

/// `cargo xtask completions`.
pub(crate) fn completions(arguments: &Arguments) -> Result<String> {
    let folder = workspace::target().join("completions");
    let mut files = Vec::new();
    for (shell, file) in SHELLS {
        files.push((file.to_owned(), output(gpushctl()?.args(["completions", shell]))?));
    }
    settle(&folder, &files, arguments.check, "completions")
}

/// `cargo xtask man`.
pub(crate) fn man(arguments: &Arguments) -> Result<String> {
    let fresh = tempfile::tempdir().context("no temporary folder")?;
    output(gpushctl()?.arg("man").arg(fresh.path()))?;
    let mut files = Vec::new();
    for entry in fs::read_dir(fresh.path())? {
        let entry = entry?;
        files.push((entry.file_name().to_string_lossy().into_owned(), fs::read_to_string(entry.path())?));
    }
    if files.is_empty() {
        bail!("gpushctl wrote no man page");
    }
    let mut gpushd = workspace::cargo();
    gpushd.args(["run", "--quiet", "--locked", "--package", "gpushd", "--features", "man", "--", "man"]);
    files.push(("gpushd.8".to_owned(), output(gpushd.stderr(Stdio::inherit()))?));
    files.sort();
    settle(&workspace::target().join("man"), &files, arguments.check, "man")
}

/// Makes what is not committed, to see that it can be made.
pub(crate) fn make_all() -> Result<String> {
    let arguments = Arguments { check: false };
    Ok(format!("{}\n{}", man(&arguments)?, completions(&arguments)?))
}

fn gpushctl() -> Result<Command> {
    let mut build = workspace::cargo();
    let built = build.args(["build", "--quiet", "--locked", "--package", "gpushctl"]).status();
    if !built.context("cargo cannot be started")?.success() {
        bail!("gpushctl does not build");
    }
    Ok(Command::new(Build::Debug.folder().join("gpushctl")))
}

fn output(command: &mut Command) -> Result<String> {
    let said = command.stdin(Stdio::null()).output();
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    let line = format!("`{} {}`", command.get_program().to_string_lossy(), words.join(" "));
    let said = said.with_context(|| format!("cannot run {line}"))?;
    if !said.status.success() {
        bail!("{line} failed ({}) {}", said.status, String::from_utf8_lossy(&said.stderr).trim());
    }
    let text = String::from_utf8(said.stdout).with_context(|| format!("{line} printed no UTF-8"))?;
    Ok(if text.is_empty() || text.ends_with('\n') { text } else { format!("{text}\n") })
}

fn settle(folder: &Path, files: &[(String, String)], check: bool, task: &str) -> Result<String> {
    let shown = folder.strip_prefix(workspace::root()).unwrap_or(folder).display();
    if check {
        for (name, made) in files {
            let there = fs::read_to_string(folder.join(name)).unwrap_or_default();
            if there != *made {
                bail!("{shown}/{name} is not what the code says; `cargo xtask {task}` writes it anew");
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

fn first_difference(there: &str, made: &str) -> String {
    let lines = there.lines().zip(made.lines()).enumerate();
    match lines.into_iter().find(|(_, (a, b))| a != b) {
        Some((number, (a, b))) => format!("line {}: `{}` there, `{}` in the code", number + 1, a.trim(), b.trim()),
        None => "one is longer than the other".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drift_of_a_generated_file_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let files = vec![("a.1".to_owned(), "one\n".to_owned())];
        assert!(settle(folder.path(), &files, true, "man").is_err());
        settle(folder.path(), &files, false, "man").unwrap();
        assert!(settle(folder.path(), &files, true, "man").is_ok());
        let other = vec![("a.1".to_owned(), "two\n".to_owned())];
        assert!(settle(folder.path(), &other, true, "man").unwrap_err().to_string().contains("cargo xtask man"));
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), "line 2: `b` there, `c` in the code");
    }
}
