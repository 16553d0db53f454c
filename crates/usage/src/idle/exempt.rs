//! `exempt` of `[idle]`: leases that the policy leaves alone.

/// Names that exempt a lease. An empty list exempts no lease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IdleExemptions {
    /// User names.
    pub users: Vec<String>,
    /// Group names.
    pub groups: Vec<String>,
    /// Slurm jobs, by id or by name.
    pub jobs: Vec<String>,
    /// Rules, by name.
    pub rules: Vec<String>,
}

/// The user, groups, job and rule of a lease. Each of them can exempt it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExemptSubject<'a> {
    /// User of the account.
    pub user: &'a str,
    /// All groups of the user.
    pub groups: &'a [String],
    /// Id of the Slurm job.
    pub job_id: Option<&'a str>,
    /// Name of the Slurm job.
    pub job_name: Option<&'a str>,
    /// Rule of the GPU.
    pub rule: Option<&'a str>,
}

impl IdleExemptions {
    /// Returns whether one of the lists names the lease.
    #[must_use]
    pub fn exempt(&self, subject: ExemptSubject<'_>) -> bool {
        let names = |list: &[String], name: Option<&str>| list.iter().any(|listed| Some(listed.as_str()) == name);
        names(&self.users, Some(subject.user))
            || subject.groups.iter().any(|group| names(&self.groups, Some(group)))
            || names(&self.jobs, subject.job_id)
            || names(&self.jobs, subject.job_name)
            || names(&self.rules, subject.rule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_list_exempts_what_it_names() {
        let list = |name: &str| vec![name.to_owned()];
        let groups = list("staff");
        let subject = ExemptSubject {
            user: "alice",
            groups: &groups,
            job_id: Some("42"),
            job_name: Some("serve"),
            rule: Some("inference"),
        };
        let none = IdleExemptions::default();
        assert!(!none.exempt(subject) && !none.exempt(ExemptSubject::default()));
        for exemptions in [
            IdleExemptions { users: list("alice"), ..none.clone() },
            IdleExemptions { groups: list("staff"), ..none.clone() },
            IdleExemptions { jobs: list("42"), ..none.clone() },
            IdleExemptions { jobs: list("serve"), ..none.clone() },
            IdleExemptions { rules: list("inference"), ..none.clone() },
        ] {
            assert!(exemptions.exempt(subject), "{exemptions:?}");
            assert!(!exemptions.exempt(ExemptSubject { user: "bob", ..ExemptSubject::default() }), "{exemptions:?}");
        }
    }
}
