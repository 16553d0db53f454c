//! Loss of state. If a part of the state directory is missing, outdated, or from another host, the
//! store reports the loss when it is opened. GPUs are held if and only if grants or operations of
//! this boot may be lost.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use std::{
    fs,
    path::{Path, PathBuf},
};

use gpush_store::{Lost, Note, Opened, Options, Store};
use scene::{lost, override_of};

const DATABASE: &str = "gpush.db";

/// A state directory, a runtime directory, and the boot and machine on which they are used.
struct Scene {
    scratch: tempfile::TempDir,
    boot: &'static str,
    machine: &'static str,
}

impl Scene {
    /// Creates a scene whose database has records.
    fn used() -> Self {
        let scene = Self { scratch: tempfile::tempdir().unwrap(), boot: "boot-1", machine: "machine-a" };
        let opened = scene.open();
        assert!(opened.notes.contains(&Note::Created), "{:?}", opened.notes);
        scene.record(&opened, "first");
        scene
    }

    fn state(&self) -> PathBuf {
        self.scratch.path().join("state")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.state().join(name)
    }

    fn marker(&self) -> PathBuf {
        self.scratch.path().join("run/gpush/store")
    }

    fn open(&self) -> Opened {
        let options = Options {
            boot_id: self.boot.to_owned(),
            marker: Some(self.marker()),
            machine_id: Some(self.machine.to_owned()),
            ..Options::default()
        };
        Store::open(&self.state(), options).unwrap()
    }

    fn record(&self, opened: &Opened, reason: &'static str) {
        let boot = gpush_store::BootRecord::new(self.boot.to_owned());
        let write = opened.store.write(move |tx| {
            tx.record_boot(&boot)?;
            tx.set_override(override_of("GPU-0", reason))
        });
        write.wait().unwrap();
    }

    /// Simulates a reboot, which clears the runtime directory.
    fn reboot(&mut self) {
        self.boot = "boot-2";
        let _ = fs::remove_dir_all(self.scratch.path().join("run"));
    }

    /// Opens the store, and expects a reported loss whose cause contains `says`.
    #[track_caller]
    fn expect_loss(&self, says: &str, holds: bool) -> Lost {
        let opened = self.open();
        let loss = lost(&opened.notes).unwrap_or_else(|| panic!("no loss reported: {:?}", opened.notes)).clone();
        assert!(loss.cause.contains(says), "{}", loss.cause);
        assert_eq!(loss.holds, holds, "{loss:?}");
        assert_eq!(overrides(&opened), Vec::<String>::new());
        drop(opened);
        // The loss is reported until it is accepted, and only once at each start.
        assert_eq!(lost(&self.open().notes), Some(&loss));
        loss
    }

    /// Opens the store, and expects all records.
    #[track_caller]
    fn expect_whole(&self) {
        let opened = self.open();
        assert_eq!((lost(&opened.notes), overrides(&opened)), (None, vec!["first".to_owned()]));
    }
}

fn overrides(opened: &Opened) -> Vec<String> {
    let found = opened.store.read(|view| view.overrides()).wait().unwrap();
    found.into_iter().map(|one| one.reason).collect()
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

#[test]
fn emptied_state_directory_on_same_boot_holds() {
    for how in ["emptied", "removed", "files"] {
        let scene = Scene::used();
        match how {
            "removed" => fs::remove_dir_all(scene.state()).unwrap(),
            "emptied" => {
                fs::remove_dir_all(scene.state()).unwrap();
                fs::create_dir(scene.state()).unwrap();
            }
            _ => [DATABASE, "watermark"].iter().for_each(|name| remove(&scene.file(name))),
        }
        scene.expect_loss("was deleted", true);
    }
}

#[test]
fn emptied_state_directory_on_new_boot_is_a_first_start() {
    let mut scene = Scene::used();
    fs::remove_dir_all(scene.state()).unwrap();
    scene.reboot();
    assert!(scene.open().notes.contains(&Note::Created));
}

#[test]
fn removed_package_data_is_a_first_start() {
    let scene = Scene::used();
    fs::remove_dir_all(scene.state()).unwrap();
    remove(&scene.marker());
    assert!(scene.open().notes.contains(&Note::Created));
}

#[test]
fn deleted_database_on_new_boot_is_reported_without_hold() {
    let mut scene = Scene::used();
    remove(&scene.file(DATABASE));
    scene.reboot();
    let loss = scene.expect_loss("was deleted", false);
    // An accepted loss is not reported again.
    scene.open().store.write(|tx| tx.accept_loss()).wait().unwrap();
    assert_eq!((loss.boot_id.as_str(), lost(&scene.open().notes)), ("boot-2", None));
}

#[test]
fn damaged_database_holds_on_same_boot_only() {
    for (reboots, holds) in [(false, true), (true, false)] {
        let mut scene = Scene::used();
        fs::write(scene.file(DATABASE), "this is no database").unwrap();
        if reboots {
            scene.reboot();
        }
        let loss = scene.expect_loss(DATABASE, holds);
        assert_eq!(fs::read_to_string(loss.kept.unwrap()).unwrap(), "this is no database");
    }
}

#[test]
fn missing_or_damaged_watermark_does_not_hide_lost_commits() {
    for watermark in [None, Some("damaged"), Some("")] {
        for reboots in [false, true] {
            let mut scene = Scene::used();
            // A copy of the database file from before the last commits. Restoring it simulates a
            // lost log.
            let old = fs::read(scene.file(DATABASE)).unwrap();
            let opened = scene.open();
            scene.record(&opened, "second");
            drop(opened);
            fs::write(scene.file(DATABASE), old).unwrap();
            match watermark {
                None => remove(&scene.file("watermark")),
                Some(text) => fs::write(scene.file("watermark"), text).unwrap(),
            }
            if reboots {
                scene.reboot();
                scene.expect_loss("watermark file is", false);
            } else {
                scene.expect_loss("it ends at change", true);
            }
        }
    }
}

#[test]
fn missing_watermark_without_marker_holds_on_recorded_boot() {
    let scene = Scene::used();
    remove(&scene.file("watermark"));
    remove(&scene.marker());
    scene.expect_loss("its watermark file is missing", true);
}

#[test]
fn missing_watermark_with_marker_loses_nothing() {
    let mut scene = Scene::used();
    remove(&scene.file("watermark"));
    scene.expect_whole();
    // The watermark was written again, because the next boot needs it.
    scene.reboot();
    scene.expect_whole();
}

#[test]
fn database_of_other_host_is_set_aside_without_hold() {
    let mut scene = Scene::used();
    scene.reboot();
    scene.machine = "machine-b";
    let opened = scene.open();
    let kept = opened.notes.iter().find_map(|note| match note {
        Note::OtherHost { kept, .. } => kept.clone(),
        _ => None,
    });
    assert!(kept.is_some_and(|kept| kept.exists()), "{:?}", opened.notes);
    assert_eq!((lost(&opened.notes), overrides(&opened)), (None, Vec::new()));
    drop(opened);
    assert!(!scene.open().notes.iter().any(|note| matches!(note, Note::OtherHost { .. })), "reported once");
}

#[test]
fn new_machine_id_on_same_boot_keeps_the_database() {
    let mut scene = Scene::used();
    scene.machine = "machine-b";
    scene.expect_whole();
    // From now on, the database belongs to this machine.
    scene.reboot();
    scene.expect_whole();
}

#[test]
fn database_exchanged_on_same_boot_holds() {
    let (scene, other) = (Scene::used(), Scene::used());
    for name in [DATABASE, "watermark"] {
        fs::copy(other.file(name), scene.file(name)).unwrap();
    }
    scene.expect_loss("it is not the database that gpushd used on this boot", true);
}

#[test]
fn unusable_marker_does_not_prevent_a_start() {
    let scene = Scene::used();
    remove(&scene.marker());
    fs::create_dir(scene.marker()).unwrap();
    scene.expect_whole();
}
