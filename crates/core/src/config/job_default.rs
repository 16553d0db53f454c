//! The key `job_default` of a rule: the share of a Slurm job that requests none.

use gpush_api::{LeaseOwner, LeaseRequest, LeaseShare, LeaseTerms, Mode};
use toml::de::DeTable;

use super::{
    Rule,
    reader::{Reader, get},
    toml_text::text,
};
use crate::{
    diagnostic::Problem,
    lease::request::{parse, spec},
};

const KEY: &str = "job_default";

/// Reads the key. `lease` has the lease keys of the rule.
pub(super) fn read(
    reader: &mut Reader<'_>,
    rule: &DeTable<'_>,
    mode: Option<Mode>,
    lease: Option<LeaseTerms>,
) -> Option<LeaseShare> {
    get(rule, KEY)?;
    let why = match mode? {
        Mode::Exclusive => Some("in mode `exclusive`: a job gets its whole GPUs".to_owned()),
        Mode::Unmanaged => Some("in mode `unmanaged`: gpushd grants no leases on the GPUs of this rule".to_owned()),
        Mode::Mig | Mode::Mps | Mode::Timeslice | Mode::NoRule => None,
    };
    let is_slurms = lease.is_some_and(|lease| lease.owner == LeaseOwner::Slurm);
    let why = why.or_else(|| (!is_slurms).then(|| "without owner = \"slurm\"".to_owned()));
    if let Some(why) = why {
        reader.report_at(rule, KEY, format!("`{KEY}` has no effect {why}"), format!("leave `{KEY}` out"));
        return None;
    }
    let written = reader.word(rule, KEY, "\"mps=25\"")?;
    let request = match parse(&written.value) {
        Ok(request) => request,
        Err(error) => {
            reader.report(Problem::new(written.span, format!("`{KEY}` is wrong: {error}"), error.hint()));
            return None;
        }
    };
    let (fits, example) = match mode? {
        Mode::Mps => (matches!(request.share, LeaseShare::Mps { .. }), "mps=25"),
        Mode::Timeslice => (matches!(request.share, LeaseShare::Timeslice {}), "timeslice"),
        Mode::Mig => {
            (matches!(request.share, LeaseShare::MigProfile { .. } | LeaseShare::MigSize { .. }), "mig=1g.10gb")
        }
        Mode::Exclusive | Mode::Unmanaged | Mode::NoRule => (true, ""),
    };
    if !fits {
        let problem = format!("`{KEY}` is not a share that the mode of the rule offers");
        reader.report(Problem::new(written.span, problem, format!("write {KEY} = \"{example}\"")));
        return None;
    }
    Some(request.share)
}

/// Returns the key with its value.
pub(super) fn written(rule: &Rule) -> Option<(&'static str, String)> {
    let share = rule.job_default.clone()?;
    Some((KEY, text(&spec(&LeaseRequest { share, ..LeaseRequest::default() }))))
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn rule(lines: &str) -> String {
        format!("[[gpu]]\nmatch = [\"0\"]\nowner = \"slurm\"\n{lines}\n")
    }

    #[test]
    fn share_of_jobs_without_a_request_is_read_and_written() {
        for (lines, expected) in [
            ("mode = \"mps\"\njob_default = \"mps=25, memory=8G\"", "mps=25,memory=8G"),
            ("mode = \"timeslice\"\njob_default = \"timeslice\"", "timeslice"),
            ("mode = \"mig\"\nlayout = [\"1g.10gb*7\"]\njob_default = \"mig=1g.10gb\"", "mig=1g.10gb"),
        ] {
            let config = Config::parse(&rule(lines), "config.toml").unwrap();
            assert!(config.effective().contains(&format!("job_default = \"{expected}\"")), "{}", config.effective());
            assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config);
        }
    }

    #[test]
    fn share_that_no_job_can_get_is_refused() {
        for (lines, problem) in [
            ("mode = \"exclusive\"\njob_default = \"whole\"", "has no effect in mode `exclusive`"),
            ("mode = \"mps\"\njob_default = \"timeslice\"", "not a share that the mode of the rule offers"),
            ("mode = \"mps\"\njob_default = \"mps=0\"", "`job_default` is wrong: "),
            ("mode = \"mps\"\njob_default = \"mps=25,for=2h\"", "`job_default` is wrong: "),
        ] {
            let problems = Config::parse(&rule(lines), "config.toml").unwrap_err();
            assert!(problems.to_string().contains(problem), "{lines}: {problems}");
        }
        let text = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\njob_default = \"mps=25\"\n";
        let problems = Config::parse(text, "config.toml").unwrap_err();
        assert!(problems.to_string().contains("without owner = \"slurm\""), "{problems}");
    }
}
