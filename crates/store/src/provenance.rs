//! Whether a sound database contains the latest state of this host.
//!
//! ```text
//! sound database ─► does this boot's marker name it? ── another ────────────► lost on this boot
//!                     │ yes, or there is no marker
//!                     ├─ of another machine, not open on this boot ─────────► other host
//!                     ├─ behind the marker, or behind its watermark ────────► lost
//!                     ├─ watermark missing or damaged, no marker ───────────► lost
//!                     └─ otherwise ─────────────────────────────────────────► current
//! ```
//!
//! After a loss on this boot, grants and operations that are still in effect may be lost, so GPUs are held. A loss that
//! is found on a new boot affects only settings, because leases and operations end with their boot.

use uuid::Uuid;

use crate::watermark::{Progress, Recorded};

/// Progress recorded outside the database, and the boot and machine on which gpushd runs.
#[derive(Debug, Clone)]
pub(crate) struct Evidence {
    /// The content of the watermark in the state directory.
    pub(crate) watermark: Recorded,
    /// The content of the marker in the runtime directory. A marker of an earlier boot is treated
    /// as missing.
    pub(crate) marker: Recorded,
    /// Digest of this boot's id.
    pub(crate) boot: u64,
    /// Id of this machine, if it has one.
    pub(crate) machine: Option<String>,
}

/// Properties that a sound database records about itself.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// Sequence number of the last commit.
    pub(crate) sequence: u64,
    /// Id of the database; `None` if an older gpushd created it.
    pub(crate) store: Option<Uuid>,
    /// Machine on which the database was last open.
    pub(crate) machine: Option<String>,
    /// Whether the database records that gpushd ran on this boot.
    pub(crate) of_this_boot: bool,
}

/// The result of judging a sound database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Provenance {
    /// The database contains the latest state.
    Current,
    /// State was lost, with the reason. `on_this_boot` says whether grants and operations of this boot may be lost.
    Lost { cause: String, on_this_boot: bool },
    /// The database belongs to another host, because the file system was cloned or moved.
    OtherHost,
}

impl Evidence {
    /// Collects the evidence. Ignores a marker of an earlier boot, because some hosts do not clear the runtime
    /// directory at a reboot.
    pub(crate) fn new(watermark: Recorded, marker: Recorded, boot: u64, machine: Option<String>) -> Self {
        let is_old = |progress: &Progress| progress.origin.is_none_or(|origin| origin.boot != boot);
        let marker = if marker.progress().is_some_and(is_old) { Recorded::Missing } else { marker };
        Self { watermark, marker, boot, machine }
    }

    /// Returns whether files outside the database show that there was an earlier database. Ignores
    /// a database without records.
    pub(crate) fn of_an_earlier_database(&self) -> bool {
        [&self.watermark, &self.marker].into_iter().any(|recorded| match recorded {
            Recorded::Missing => false,
            Recorded::Damaged => true,
            Recorded::Progress(progress) => progress.sequence > 0,
        })
    }

    /// Returns whether gpushd used a database on this boot. A watermark of format 1 does not
    /// contain the boot. To be safe, the function returns `true` for such a watermark.
    pub(crate) fn used_on_this_boot(&self) -> bool {
        self.marker != Recorded::Missing
            || self
                .watermark
                .progress()
                .is_some_and(|progress| progress.origin.is_none_or(|origin| origin.boot == self.boot))
    }

    /// Returns the highest sequence number that was recorded for any database.
    pub(crate) fn highest_sequence(&self) -> Option<u64> {
        [&self.watermark, &self.marker].into_iter().filter_map(|one| Some(one.progress()?.sequence)).max()
    }

    /// Judges a database that is sound in itself.
    pub(crate) fn judge(&self, database: &Identity) -> Provenance {
        let names = |progress: &Progress| progress.origin.map(|origin| Some(origin.store) == database.store);
        let lost =
            |cause: String| Provenance::Lost { cause, on_this_boot: self.used_on_this_boot() || database.of_this_boot };
        let behind = |recorded: &Progress| {
            lost(format!(
                "it ends at change {}, but change {} was recorded: part of the file is damaged, or an old copy was \
                restored",
                database.sequence, recorded.sequence
            ))
        };
        if let Some(marker) = self.marker.progress() {
            if names(marker) != Some(true) {
                return lost("it is not the database that gpushd used on this boot".to_owned());
            }
            if database.sequence < marker.sequence {
                return behind(marker);
            }
            // Do not check the watermark, because the marker is stronger evidence.
            return Provenance::Current;
        }
        let other_machine = self.machine.as_ref().zip(database.machine.as_ref()).is_some_and(|(ours, its)| ours != its);
        if other_machine && !self.used_on_this_boot() {
            return Provenance::OtherHost;
        }
        match &self.watermark {
            Recorded::Progress(watermark) if names(watermark) == Some(false) => {
                lost("its watermark file was written for another database".to_owned())
            }
            Recorded::Progress(watermark) if database.sequence < watermark.sequence => behind(watermark),
            Recorded::Progress(_) => Provenance::Current,
            // gpushd was killed during its first start, before the first commit.
            Recorded::Missing | Recorded::Damaged if database.sequence == 0 => Provenance::Current,
            Recorded::Missing => {
                lost("its watermark file is missing, so it is not known whether the database is complete".to_owned())
            }
            Recorded::Damaged => {
                lost("its watermark file is damaged, so it is not known whether the database is complete".to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watermark::{Origin, boot_digest};

    const NOW: &str = "this boot";
    const OURS: u128 = 1;
    const OTHER: u128 = 2;

    fn recorded(sequence: u64, store: u128, boot: &str) -> Recorded {
        let origin = Some(Origin { store: Uuid::from_u128(store), boot: boot_digest(boot) });
        Recorded::Progress(Progress { sequence, origin })
    }

    fn evidence(watermark: Recorded, marker: Recorded) -> Evidence {
        Evidence::new(watermark, marker, boot_digest(NOW), Some("machine a".to_owned()))
    }

    fn database(sequence: u64) -> Identity {
        let (store, machine) = (Some(Uuid::from_u128(OURS)), Some("machine a".to_owned()));
        Identity { sequence, store, machine, of_this_boot: false }
    }

    /// Returns `None` for a current database. For a loss, returns whether grants and operations of this boot may be
    /// lost.
    fn lost(evidence: &Evidence, database: &Identity) -> Option<bool> {
        match evidence.judge(database) {
            Provenance::Current => None,
            Provenance::Lost { on_this_boot, .. } => Some(on_this_boot),
            Provenance::OtherHost => panic!("another host"),
        }
    }

    #[test]
    fn database_up_to_its_watermarks_is_current() {
        for (watermark, marker) in [
            (recorded(10, OURS, "earlier"), Recorded::Missing),
            (recorded(10, OURS, NOW), recorded(10, OURS, NOW)),
            (recorded(7, OURS, NOW), recorded(9, OURS, NOW)),
            // The marker alone is sufficient evidence.
            (Recorded::Missing, recorded(10, OURS, NOW)),
            (Recorded::Damaged, recorded(10, OURS, NOW)),
            (recorded(3, OTHER, "earlier"), recorded(10, OURS, NOW)),
            (recorded(10, OURS, "earlier"), Recorded::Damaged),
            (recorded(10, OURS, NOW), recorded(99, OTHER, "earlier")),
        ] {
            assert_eq!(lost(&evidence(watermark, marker), &database(10)), None, "{watermark:?} {marker:?}");
        }
        let older = Recorded::Progress(Progress { sequence: 10, origin: None });
        assert_eq!(lost(&evidence(older, Recorded::Missing), &database(10)), None);
    }

    #[test]
    fn database_behind_or_exchanged_is_lost() {
        for (watermark, marker, on_this_boot) in [
            (recorded(11, OURS, NOW), Recorded::Missing, true),
            (recorded(11, OURS, "earlier"), Recorded::Missing, false),
            (recorded(10, OURS, NOW), recorded(11, OURS, NOW), true),
            (recorded(1, OURS, "earlier"), recorded(11, OURS, NOW), true),
            (recorded(10, OURS, NOW), recorded(2, OTHER, NOW), true),
            (recorded(2, OTHER, NOW), Recorded::Missing, true),
            (recorded(2, OTHER, "earlier"), Recorded::Missing, false),
            (Recorded::Missing, Recorded::Missing, false),
            (Recorded::Damaged, Recorded::Missing, false),
            (Recorded::Damaged, Recorded::Damaged, true),
        ] {
            let found = lost(&evidence(watermark, marker), &database(10));
            assert_eq!(found, Some(on_this_boot), "{watermark:?} {marker:?}");
        }
        let of_this_boot = Identity { of_this_boot: true, ..database(10) };
        assert_eq!(lost(&evidence(Recorded::Missing, Recorded::Missing), &of_this_boot), Some(true));
    }

    #[test]
    fn new_machine_id_and_other_machine_are_distinguished() {
        let cloned = Identity { machine: Some("machine b".to_owned()), ..database(10) };
        for watermark in [recorded(10, OURS, "earlier"), recorded(99, OTHER, "earlier"), Recorded::Missing] {
            assert_eq!(evidence(watermark, Recorded::Missing).judge(&cloned), Provenance::OtherHost, "{watermark:?}");
        }
        // The machine id changed while gpushd used the database: in a container, or by `systemd-machine-id-setup`.
        assert_eq!(lost(&evidence(recorded(10, OURS, NOW), Recorded::Missing), &cloned), None);
        assert_eq!(lost(&evidence(Recorded::Missing, recorded(10, OURS, NOW)), &cloned), None);
        let unknown = Evidence { machine: None, ..evidence(recorded(10, OURS, "earlier"), Recorded::Missing) };
        assert_eq!(lost(&unknown, &cloned), None);
    }

    #[test]
    fn first_start_that_was_killed_loses_nothing() {
        let none = evidence(Recorded::Missing, Recorded::Missing);
        assert_eq!(lost(&none, &database(0)), None);
        assert!(!none.of_an_earlier_database());
        let unused = evidence(recorded(0, OURS, NOW), recorded(0, OURS, NOW));
        assert!(!unused.of_an_earlier_database());
        assert!(evidence(Recorded::Damaged, Recorded::Missing).of_an_earlier_database());
    }
}
