//! `[idle]`: what gpushd does with unused leases, and the key `idle` of a rule, which overrides it.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{IdleAction, Mode};
use toml::de::DeTable;

use super::{
    Config, Rule,
    account_name::account,
    reader::{Reader, Text, get},
    schema::{IDLE_EXEMPT, RULE_IDLE},
    toml_text::{list, span, text},
    warning_times,
};
use crate::{diagnostic::Problem, nearest::nearest, quote::Quoted};

/// Longest time of a setting: 30 days.
const LONGEST: Duration = Duration::from_secs(30 * 86_400);

/// `[idle]`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Idle {
    /// The settings that a rule can override.
    pub terms: IdleTerms,
    /// What happens to Slurm jobs whose leases are unused.
    pub slurm_jobs: IdleJobs,
    /// `[idle.exempt]`
    pub exempt: IdleExempt,
}

/// What gpushd does with unused leases on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleTerms {
    /// The action.
    pub action: IdleAction,
    /// Time from the grant in which nothing counts as unused.
    pub start_grace: Duration,
    /// Unused time after which the action is due.
    pub after: Duration,
    /// Time without a process after which the action is due.
    pub empty_after: Duration,
    /// How long before the action gpushd warns the holder, longest first.
    pub warn_before: Vec<Duration>,
    /// Longest time for which a holder can keep an unused lease.
    pub max_keep: Duration,
    /// Whether a lease on a device that reports no activity counts as idle while its processes and their memory stay the
    /// same. A program can compute meanwhile, so such a lease can end while it works. Only a rule can set it.
    pub by_memory: bool,
}

impl Default for IdleTerms {
    fn default() -> Self {
        const MINUTE: u64 = 60;
        Self {
            action: IdleAction::Report,
            start_grace: Duration::from_secs(60 * MINUTE),
            after: Duration::from_secs(240 * MINUTE),
            empty_after: Duration::from_secs(30 * MINUTE),
            warn_before: vec![Duration::from_secs(60 * MINUTE), Duration::from_secs(15 * MINUTE)],
            max_keep: Duration::from_secs(480 * MINUTE),
            by_memory: false,
        }
    }
}

/// What happens to Slurm jobs whose leases are unused, if the action ends leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum IdleJobs {
    /// gpushd only reports the job.
    #[default]
    Report,
    /// gpushd warns the user of the job, and then cancels the job with `scancel`.
    Cancel,
}

/// `[idle.exempt]`: leases that gpushd leaves alone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IdleExempt {
    /// User names.
    pub users: Vec<String>,
    /// Group names.
    pub groups: Vec<String>,
    /// Ids of Slurm jobs.
    pub jobs: Vec<String>,
    /// Names of rules.
    pub rules: Vec<String>,
}

/// The keys that a rule sets. A key that is `None` has the value of `[idle]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleIdle {
    /// The action.
    pub action: Option<IdleAction>,
    /// Time from the grant in which nothing counts as unused.
    pub start_grace: Option<Duration>,
    /// Unused time after which the action is due.
    pub after: Option<Duration>,
    /// Time without a process after which the action is due.
    pub empty_after: Option<Duration>,
    /// How long before the action gpushd warns the holder.
    pub warn_before: Option<Vec<Duration>>,
    /// Longest time for which a holder can keep an unused lease.
    pub max_keep: Option<Duration>,
    /// See [`IdleTerms::by_memory`].
    pub by_memory: Option<bool>,
}

const ACTIONS: [(&str, IdleAction); 4] = [
    ("report", IdleAction::Report),
    ("warn", IdleAction::Warn),
    ("release", IdleAction::Release),
    ("end", IdleAction::End),
];

const SLURM_JOBS: [(&str, IdleJobs); 2] = [("report", IdleJobs::Report), ("scancel", IdleJobs::Cancel)];

impl Config {
    /// Returns what gpushd does with unused leases on the GPUs of a rule. `rule` is its position; `None` for GPUs without
    /// a rule.
    #[must_use]
    pub fn idle_terms(&self, rule: Option<usize>) -> IdleTerms {
        let own = rule.and_then(|position| self.rules.get(position)?.idle.clone()).unwrap_or_default();
        let all = self.idle.terms.clone();
        IdleTerms {
            action: own.action.unwrap_or(all.action),
            start_grace: own.start_grace.unwrap_or(all.start_grace),
            after: own.after.unwrap_or(all.after),
            empty_after: own.empty_after.unwrap_or(all.empty_after),
            warn_before: own.warn_before.unwrap_or(all.warn_before),
            max_keep: own.max_keep.unwrap_or(all.max_keep),
            by_memory: own.by_memory.unwrap_or(false),
        }
    }

    /// Returns whether gpushd does more than to report unused leases on any GPU, so that it needs samples.
    #[must_use]
    pub fn acts_on_unused_leases(&self) -> bool {
        let of_rules = self.rules.iter().filter_map(|rule| rule.idle.as_ref()?.action);
        of_rules.chain([self.idle.terms.action]).any(|action| action != IdleAction::Report)
    }
}

/// Reads `[idle]`.
pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Idle {
    let (own, default) = (keys(reader, table), IdleTerms::default());
    let slurm_jobs = reader.choice(table, "slurm_jobs", "valid value of `slurm_jobs`", &SLURM_JOBS);
    Idle {
        terms: IdleTerms {
            action: own.action.unwrap_or(default.action),
            start_grace: own.start_grace.unwrap_or(default.start_grace),
            after: own.after.unwrap_or(default.after),
            empty_after: own.empty_after.unwrap_or(default.empty_after),
            warn_before: own.warn_before.unwrap_or(default.warn_before),
            max_keep: own.max_keep.unwrap_or(default.max_keep),
            by_memory: false,
        },
        slurm_jobs: slurm_jobs.unwrap_or_default(),
        exempt: exempt(reader, table),
    }
}

/// Reads the key `idle` of a rule.
pub(super) fn of_rule(reader: &mut Reader<'_>, rule: &DeTable<'_>, mode: Option<Mode>) -> Option<RuleIdle> {
    get(rule, "idle")?;
    if mode == Some(Mode::Unmanaged) {
        let problem = "`idle` has no effect in mode `unmanaged`: gpushd grants no leases on the GPUs of this rule";
        reader.report_at(rule, "idle", problem, "write another mode, or leave `idle` out");
        return None;
    }
    let table = reader.table(rule, RULE_IDLE)?;
    reader.report_unknown_keys(table, RULE_IDLE, &[]);
    let by_memory = reader.flag(table, "by_memory");
    Some(RuleIdle { by_memory, ..keys(reader, table) })
}

fn keys(reader: &mut Reader<'_>, table: &DeTable<'_>) -> RuleIdle {
    let default = IdleTerms::default();
    let second = Duration::from_secs(1);
    let mut time = |key: &str, least: Duration, default: Duration| {
        get(table, key).map(|_| reader.duration(table, key, least..=LONGEST, default))
    };
    let start_grace = time("start_grace", Duration::ZERO, default.start_grace);
    let after = time("after", second, default.after);
    let empty_after = time("empty_after", second, default.empty_after);
    let max_keep = time("max_keep", Duration::ZERO, default.max_keep);
    RuleIdle {
        action: reader.choice(table, "action", "valid value of `action`", &ACTIONS),
        start_grace,
        after,
        empty_after,
        warn_before: warning_times::read(reader, table, "warn_before"),
        max_keep,
        by_memory: None,
    }
}

fn exempt(reader: &mut Reader<'_>, idle: &DeTable<'_>) -> IdleExempt {
    let Some(table) = reader.table(idle, IDLE_EXEMPT) else { return IdleExempt::default() };
    reader.report_unknown_keys(table, IDLE_EXEMPT, &[]);
    let mut names = |key: &str, example: &str| -> Vec<String> {
        let texts = reader.words(table, key, example).unwrap_or_default();
        let all = "write action = \"report\"";
        texts.into_iter().filter_map(|text| account(reader, text, key, all)).collect()
    };
    let (users, groups) = (names("users", "[\"anna\"]"), names("groups", "[\"ml\"]"));
    let jobs = reader.words(table, "jobs", "[\"4711\"]").unwrap_or_default();
    let mut ids = Vec::new();
    for job in jobs {
        if job.value.bytes().all(|digit| digit.is_ascii_digit()) {
            ids.push(job.value);
        } else {
            let message = format!("{} is not the id of a Slurm job", Quoted(&job.value));
            reader.report(Problem::new(job.span, message, "write the number that `squeue` shows: jobs = [\"4711\"]"));
        }
    }
    let rules = reader.words(table, "rules", "[\"training\"]").unwrap_or_default();
    IdleExempt { users, groups, jobs: ids, rules: rules.into_iter().map(|rule| rule.value).collect() }
}

/// Reports exempt rules that the file does not have. A misspelt name would not exempt any lease.
pub(super) fn check_exempt_rules(reader: &mut Reader<'_>, idle: &DeTable<'_>, rules: &[Rule]) {
    let Some(table) = get(idle, "exempt").and_then(|value| value.get_ref().as_table()) else { return };
    let known: BTreeSet<&str> = rules.iter().filter_map(|rule| rule.name.as_deref()).collect();
    let Some(value) = get(table, "rules") else { return };
    let Some(items) = value.get_ref().as_array() else { return };
    let texts: Vec<Text> = items.iter().filter_map(|item| reader.text_of(item)).collect();
    for text in texts {
        if known.contains(text.value.as_str()) {
            continue;
        }
        let names: Vec<&str> = known.iter().copied().collect();
        let hint = match nearest(&text.value, names.iter().copied()) {
            Some(meant) => format!("did you mean \"{meant}\"?"),
            None if names.is_empty() => {
                "no rule has a name: write for example name = \"training\" in a [[gpu]] rule".to_owned()
            }
            None => format!("write one of: {}", names.join(", ")),
        };
        reader.report(Problem::new(text.span.clone(), format!("there is no rule {}", Quoted(&text.value)), hint));
    }
}

/// Returns the keys of `[idle]` with their values.
pub(super) fn written(idle: &Idle) -> Vec<(&'static str, String)> {
    let IdleTerms { action, start_grace, after, empty_after, warn_before, max_keep, by_memory: _ } = &idle.terms;
    let slurm_jobs = SLURM_JOBS.iter().find(|(_, jobs)| *jobs == idle.slurm_jobs).map_or("", |(name, _)| *name);
    vec![
        ("action", text(action.name())),
        ("start_grace", span(*start_grace)),
        ("after", span(*after)),
        ("empty_after", span(*empty_after)),
        ("warn_before", warning_times::written(warn_before)),
        ("max_keep", span(*max_keep)),
        ("slurm_jobs", text(slurm_jobs)),
    ]
}

/// Returns the keys of `[idle.exempt]` with their values.
pub(super) fn written_exempt(exempt: &IdleExempt) -> [(&'static str, String); 4] {
    let IdleExempt { users, groups, jobs, rules } = exempt;
    [("users", list(users)), ("groups", list(groups)), ("jobs", list(jobs)), ("rules", list(rules))]
}

/// Formats what a rule sets, as the value of the rule's key `idle`.
pub(super) fn written_rule(idle: &RuleIdle) -> String {
    let RuleIdle { action, start_grace, after, empty_after, warn_before, max_keep, by_memory } = idle;
    let pairs = [
        ("action", action.map(|action| text(action.name()))),
        ("start_grace", start_grace.map(span)),
        ("after", after.map(span)),
        ("empty_after", empty_after.map(span)),
        ("warn_before", warn_before.as_deref().map(warning_times::written)),
        ("max_keep", max_keep.map(span)),
        ("by_memory", by_memory.map(|flag| flag.to_string())),
    ];
    let pairs: Vec<String> = pairs.into_iter().filter_map(|(key, value)| Some(format!("{key} = {}", value?))).collect();
    if pairs.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", pairs.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, "config.toml").map_err(|error| error.to_string())
    }

    const RULE: &str = "[[gpu]]\nname = \"training\"\nmatch = \"0\"\nmode = \"exclusive\"\n";

    #[test]
    fn rule_overrides_only_the_keys_that_it_sets() {
        let text = format!(
            "[idle]\naction = \"warn\"\nafter = \"2h\"\nslurm_jobs = \"scancel\"\n\
             exempt = {{ users = [\"anna\"], groups = [\"ml\"], jobs = [\"4711\"], rules = [\"training\"] }}\n\
             {RULE}idle = {{ action = \"end\", warn_before = [\"5m\", \"30m\"], by_memory = true }}\n"
        );
        let config = parse(&text).unwrap();
        assert_eq!((config.idle.terms.action, config.idle.slurm_jobs), (IdleAction::Warn, IdleJobs::Cancel));
        let own = config.idle_terms(Some(0));
        assert_eq!((own.action, own.after), (IdleAction::End, Duration::from_secs(7200)));
        assert_eq!(own.warn_before, [1800, 300].map(Duration::from_secs));
        assert!(own.by_memory && !config.idle.terms.by_memory);
        assert_eq!(config.idle_terms(None), config.idle.terms);
        assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config);
        assert!(config.acts_on_unused_leases() && !Config::default().acts_on_unused_leases());
        assert!(parse(&format!("{RULE}[gpu.idle]\naction = \"warn\"\n")).unwrap().acts_on_unused_leases());
    }

    #[test]
    fn wrong_values_are_named_with_their_line() {
        for (text, line, part) in [
            ("[idle]\naction = \"kill\"\n".to_owned(), 2, "is not a valid value of `action`"),
            ("[idle]\nafter = \"0s\"\n".to_owned(), 2, "write whole seconds from \"1s\""),
            ("[idle]\nafter = 4\n".to_owned(), 2, "a duration in quotes"),
            ("[idle]\nmax_keep = \"60d\"\n".to_owned(), 2, "`max_keep` can't be"),
            ("[idle]\nwarn_before = [60, 15]\n".to_owned(), 2, "`warn_before` has no unit of time"),
            ("[idle]\nslurm_jobs = \"cancel\"\n".to_owned(), 2, "scancel"),
            ("[idle.exempt]\nusers = [\"@ml\"]\n".to_owned(), 2, "write its name in `groups`"),
            ("[idle.exempt]\njobs = [\"train\"]\n".to_owned(), 2, "is not the id of a Slurm job"),
            ("[idle.exempt]\nrules = [\"trainin\"]\n".to_owned() + RULE, 2, "did you mean \"training\"?"),
            ("[idle]\nexempt = 3\n".to_owned(), 2, "`exempt` must be a table"),
            ("[idle]\nafer = \"4h\"\n".to_owned(), 2, "after"),
            (format!("{RULE}idle = {{ slurm_jobs = \"scancel\" }}\n"), 5, "slurm_jobs"),
            (
                "[[gpu]]\nmatch = \"0\"\nmode = \"unmanaged\"\nidle = { action = \"warn\" }\n".to_owned(),
                4,
                "has no effect",
            ),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(part) && error.contains(&format!(":{line}:")), "{text}: {error}");
        }
    }
}
