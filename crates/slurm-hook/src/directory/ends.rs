//! Ended jobs that a hook could not report to gpushd. The next hook reports them.

use std::io;

use gpush_api::SlurmJobEnd;
use gpush_core::slurm::job_files::FileName;

use super::Directory;

/// Suffix of a file that records an ended job. A node name in a file name never contains a `+`, so
/// no other job file ends with this suffix.
const ENDED: &str = "+ended";

fn name_of(end: &SlurmJobEnd) -> String {
    format!("{}{ENDED}", FileName::of_job(&end.cluster, end.job, &end.node))
}

impl Directory {
    /// Records the end of a job that could not be reported to gpushd. If there is already a record
    /// of a later run of the same job, keeps that record.
    pub(crate) fn note_end(&self, end: &SlurmJobEnd) -> io::Result<()> {
        let _locked = self.lock()?;
        let name = name_of(end);
        match self.read_json::<SlurmJobEnd>(&name) {
            Ok(noted) if noted.restart > end.restart => Ok(()),
            Ok(_) | Err(_) => self.write_json(&name, end),
        }
    }

    /// Removes the record of an ended job after it was reported. Keeps the record of a later run,
    /// which another hook may have written meanwhile.
    pub(crate) fn end_delivered(&self, end: &SlurmJobEnd) {
        let name = name_of(end);
        // Most jobs have no such record. So first check whether it exists, without waiting for the
        // lock.
        if !self.path.join(&name).exists() {
            return;
        }
        let Ok(_locked) = self.lock() else { return };
        match self.read_json::<SlurmJobEnd>(&name) {
            Ok(noted) if noted.restart > end.restart => {}
            Ok(_) => self.remove_file(&name),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // A record that cannot be read can never be reported, so remove it.
            Err(_) => self.remove_file(&name),
        }
    }

    /// Returns whether the end of this job is recorded but not reported to gpushd yet.
    pub(super) fn has_noted_end(&self, job: &FileName) -> bool {
        self.path.join(format!("{job}{ENDED}")).exists()
    }

    /// Returns the ended jobs that are not reported to gpushd yet.
    pub(crate) fn undelivered_ends(&self) -> Vec<SlurmJobEnd> {
        let names = self.names().unwrap_or_default();
        names.iter().filter(|name| name.ends_with(ENDED)).filter_map(|name| self.read_json(name).ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn end(cluster: &str, node: &str, restart: u32) -> SlurmJobEnd {
        SlurmJobEnd { cluster: cluster.to_owned(), job: 42, node: node.to_owned(), restart, until_ms: 0 }
    }

    #[test]
    fn delivered_end_of_an_earlier_run_keeps_that_of_a_later_run() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::new(dir.path(), Instant::now() + Duration::from_secs(600));
        directory.note_end(&end("ci", "n1", 0)).unwrap();
        // Simulates that one hook reports the end of a run, while another hook records the end of
        // the next run.
        let read = directory.undelivered_ends();
        directory.note_end(&end("ci", "n1", 1)).unwrap();
        directory.end_delivered(&read[0]);
        assert_eq!(directory.undelivered_ends(), [end("ci", "n1", 1)]);
        // Simulates a late hook of the first run. It must not replace the record of the second run.
        directory.note_end(&end("ci", "n1", 0)).unwrap();
        assert_eq!(directory.undelivered_ends(), [end("ci", "n1", 1)]);
        directory.end_delivered(&end("ci", "n1", 1));
        assert_eq!(directory.undelivered_ends(), []);
    }

    #[test]
    fn clusters_and_nodes_have_their_own_ends() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::new(dir.path(), Instant::now() + Duration::from_secs(600));
        for (cluster, node) in [("a", "n1"), ("b", "n1"), ("a", "n2")] {
            directory.note_end(&end(cluster, node, 0)).unwrap();
        }
        directory.end_delivered(&end("a", "n1", 0));
        let mut left = directory.undelivered_ends();
        left.sort_by_key(|end| end.cluster.clone());
        assert_eq!(left, [end("a", "n2", 0), end("b", "n1", 0)]);
    }
}
