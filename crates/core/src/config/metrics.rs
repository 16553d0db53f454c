//! `[metrics]`: who may read the metrics of leases, and files for other exporters.

use toml::de::DeTable;

use super::{reader::Reader, toml_text::list};
use crate::{diagnostic::Problem, quote::Quoted};

/// `[metrics]`
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Users who may read the metrics of all leases, in addition to administrators.
    pub readers: Vec<String>,
    /// Whether gpushd writes files with the Slurm jobs on each GPU.
    pub job_files: bool,
}

impl Metrics {
    /// Returns the keys and their values as TOML.
    pub(super) fn written(&self) -> [(&'static str, Option<String>); 2] {
        [("readers", Some(list(&self.readers))), ("job_files", Some(self.job_files.to_string()))]
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Metrics {
    let mut readers: Vec<String> = Vec::new();
    for name in reader.words(table, "readers", "[\"prometheus\"]").unwrap_or_default() {
        let problem = if name.value.is_empty() || name.value.contains([':', ',', '/', ' ']) {
            (format!("{} is not the name of a user", Quoted(&name.value)), "write names, such as [\"prometheus\"]")
        } else if readers.contains(&name.value) {
            (format!("user {} is listed twice", Quoted(&name.value)), "keep one")
        } else {
            readers.push(name.value);
            continue;
        };
        reader.report(Problem::new(name.span, problem.0, problem.1));
    }
    Metrics { readers, job_files: reader.flag(table, "job_files").unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn readers_are_names_of_users() {
        let read = |readers: &str| Config::parse(&format!("[metrics]\nreaders = {readers}\n"), "config.toml");
        assert_eq!(read("[\"prometheus\", \"anna\"]").unwrap().metrics.readers, ["prometheus", "anna"]);
        for (readers, problem) in [
            ("[\"a b\"]", "`a b` is not the name of a user"),
            ("[\"\"]", "`readers` is empty"),
            ("[\"anna\", \"anna\"]", "user `anna` is listed twice"),
        ] {
            let error = read(readers).unwrap_err().to_string();
            assert!(error.contains(problem), "{readers}: {error}");
        }
    }
}
