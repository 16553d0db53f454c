//! Maintainer scripts and the spec. They are templates below `packaging/` with two kinds of
//! placeholders.
//! - `#include NAME` is replaced by the text of `packaging/scripts/NAME`, indented like the
//!   `#include`. So a script that both formats need exists only once.
//! - `@NAME@` is replaced by a value of the build.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, bail};

use super::Release;
use crate::workspace;

/// The values of the placeholders.
#[derive(Debug, Clone)]
pub(super) struct Values(BTreeMap<&'static str, String>);

impl Values {
    pub(super) fn new(release: &Release, glibc: &str, schema: u32) -> Self {
        let values =
            [("VERSION", release.version.clone()), ("GLIBC", format!("GLIBC_{glibc}")), ("SCHEMA", schema.to_string())];
        Self(values.into())
    }

    /// Returns the newest database schema that the packaged gpushd reads.
    pub(super) fn schema(&self) -> &str {
        &self.0["SCHEMA"]
    }

    /// Returns a copy of these values with one value added.
    pub(super) fn with(&self, name: &'static str, value: String) -> Self {
        let mut values = self.clone();
        values.0.insert(name, value);
        values
    }

    /// Returns a template of `packaging/` with its placeholders replaced.
    ///
    /// # Errors
    /// If a file cannot be read, or a placeholder has no value.
    pub(super) fn fill(&self, template: &str) -> Result<String> {
        let folder = workspace::root().join("packaging");
        let text = read(&folder.join(template))?;
        self.substitute(&include(&text, |name| read(&folder.join("scripts").join(name)))?)
            .with_context(|| format!("packaging/{template}"))
    }

    fn substitute(&self, text: &str) -> Result<String> {
        let mut text = text.to_owned();
        for (name, value) in &self.0 {
            text = text.replace(&format!("@{name}@"), value);
        }
        let is_name = |word: &&str| !word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase());
        match text.split('@').skip(1).step_by(2).find(is_name) {
            Some(name) => bail!("@{name}@ has no value"),
            None => Ok(text),
        }
    }
}

fn include(text: &str, read: impl Fn(&str) -> Result<String>) -> Result<String> {
    let mut whole = String::new();
    for line in text.lines() {
        let Some(name) = line.trim_start().strip_prefix("#include ") else {
            whole.push_str(line);
            whole.push('\n');
            continue;
        };
        let indent = &line[..line.len() - line.trim_start().len()];
        for included in read(name.trim())?.lines() {
            if !included.is_empty() {
                whole.push_str(indent);
            }
            whole.push_str(included);
            whole.push('\n');
        }
    }
    Ok(whole)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(pairs: &[(&'static str, &str)]) -> Values {
        Values(pairs.iter().map(|(name, value)| (*name, (*value).to_owned())).collect())
    }

    #[test]
    fn included_lines_take_the_indent_of_the_include() {
        let text = "a)\n    #include b.sh\n    ;;\n";
        let whole = include(text, |name| Ok(format!("one {name}\n\n  two\n"))).unwrap();
        assert_eq!(whole, "a)\n    one b.sh\n\n      two\n    ;;\n");
    }

    #[test]
    fn placeholder_without_value_is_an_error() {
        let values = values(&[("VERSION", "1.0")]);
        assert_eq!(values.substitute("v @VERSION@, mail a@b.c").unwrap(), "v 1.0, mail a@b.c");
        assert!(values.substitute("@SCHEMA@").unwrap_err().to_string().contains("@SCHEMA@"));
    }

    #[test]
    fn every_script_is_valid_for_a_posix_shell() {
        let values = values(&[("VERSION", "1.0"), ("SCHEMA", "2")]);
        for name in ["preinst", "postinst", "prerm", "postrm"] {
            let script = values.fill(&format!("deb/{name}")).unwrap();
            let checked = std::process::Command::new("sh").args(["-n", "-c", &script]).status().unwrap();
            assert!(checked.success() && !script.contains("#include"), "{name}:\n{script}");
        }
    }
}
