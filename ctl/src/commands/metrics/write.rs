//! `gpushctl metrics write FILE`: a file for the textfile collector of node_exporter.
//!
//! node_exporter reads every file whose name ends with `.prom`, in the classic format. It can read at any time, so the
//! command writes a temporary file with another ending in the same directory, and renames it. On a failure, the old file
//! stays, and the temporary file is removed.

use std::{
    fs::Permissions,
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
};

use gpush_api::{ApiError, Code};
use gpush_client::{Client, MetricsText, MetricsView};
use gpush_openmetrics::Format;
use nix::unistd::{Gid, Group, Uid, User};
use serde::Serialize;

use crate::{
    args::MetricsWriteArgs,
    exit::{self, Outcome},
    output::Output,
    render::trouble,
};

/// Mode of the file. It may name users and their jobs.
const MODE: u32 = 0o640;

/// The ending of the names that node_exporter reads.
const ENDING: &str = ".prom";

/// The output of `gpushctl metrics write --json`.
#[derive(Serialize)]
pub(in crate::commands) struct WrittenMetrics<'a> {
    /// Path of the file.
    pub(in crate::commands) file: &'a Path,
    /// Size of the file.
    pub(in crate::commands) bytes: usize,
}

/// The file to write, checked before gpushctl sends a request.
pub(super) struct Textfile {
    file: PathBuf,
    directory: PathBuf,
    name: String,
    group: Option<Gid>,
    view: MetricsView,
}

impl Textfile {
    /// Checks the arguments.
    ///
    /// # Errors
    /// The name has the wrong ending, the directory does not exist, the path is a directory, or the group does not exist.
    pub(super) fn check(args: &MetricsWriteArgs) -> Result<Self, ApiError> {
        let file = args.file.clone();
        let shown = file.display();
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !name.ends_with(ENDING) || name.len() == ENDING.len() {
            let what = format!("cannot write metrics to {shown}: its name does not end with {ENDING}");
            return Err(ApiError::new(Code::BadRequest, what)
                .cause(format!("node_exporter reads only files whose names end with {ENDING}"))
                .hint("`gpushctl metrics write /var/lib/prometheus/node-exporter/gpush.prom`"));
        }
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new(".")).to_owned();
        let at = directory.display();
        match std::fs::metadata(&directory) {
            Ok(of) if of.is_dir() => {}
            Ok(_) => {
                let what = format!("cannot write {shown}: {at} is not a directory");
                return Err(ApiError::new(Code::BadRequest, what).hint(DIRECTORY));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let what = format!("cannot write {shown}: the directory {at} does not exist");
                return Err(ApiError::new(Code::NotFound, what).hint(DIRECTORY));
            }
            Err(error) => return Err(exit::io(format!("cannot write {shown}"), &error).hint(DIRECTORY)),
        }
        if file.is_dir() {
            let what = format!("cannot write {shown}: it is a directory");
            return Err(ApiError::new(Code::BadRequest, what).hint(format!("name a file in it: {shown}/gpush.prom")));
        }
        let group = args.group.as_deref().map(gid).transpose()?;
        Ok(Self { file, directory, name, group, view: args.selection.view() })
    }

    /// Requests the metrics and replaces the file.
    pub(super) async fn write(&self, client: &mut Client, out: &Output) -> Outcome {
        let MetricsText { content_type, text } = client.metrics(Format::Classic.content_type(), self.view).await?;
        if !content_type.starts_with("text/plain") {
            let what = "gpushd answered with metrics in a format that node_exporter cannot read";
            let error = ApiError::new(Code::Unreachable, what).cause(format!("content type {content_type}"));
            return Err(error.hint("install the same version of gpushd and gpushctl").into());
        }
        self.replace(&text).map_err(|error| self.unwritable(&error, Uid::effective().is_root()))?;
        if let Some(warning) = self.shared_directory() {
            out.remark(&(trouble::lines("warning", &warning, 0, &out.look).join("\n") + "\n"));
        }
        if out.json {
            out.document(&WrittenMetrics { file: &self.file, bytes: text.len() })?;
        }
        Ok(0)
    }

    /// Returns a warning if other users can replace the file. The user of node_exporter may: its group reads the file.
    fn shared_directory(&self) -> Option<ApiError> {
        let of = std::fs::metadata(&self.directory).ok()?;
        let is_reader = |uid: u32| {
            let owner = User::from_uid(Uid::from_raw(uid)).ok().flatten();
            self.group.is_some_and(|group| owner.is_some_and(|owner| owner.gid == group))
        };
        let at = self.directory.display();
        let (who, hint) = if of.mode() & 0o1002 == 0o002 {
            ("every user of this host".to_owned(), format!("`chmod o-w {at}`"))
        } else if of.uid() != 0 && of.uid() != Uid::effective().as_raw() && !is_reader(of.uid()) {
            let hint = "write to a directory of root or of the user of node_exporter; --group names its group";
            (format!("uid {}, the owner of {at},", of.uid()), hint.to_owned())
        } else {
            return None;
        };
        let what = format!("{who} can replace {}", self.file.display());
        Some(ApiError::new(Code::ConfigInvalid, what).hint(hint))
    }

    /// Replaces the file. Does not sync it: after a crash of the host, the next run of the timer writes it again.
    fn replace(&self, text: &[u8]) -> io::Result<()> {
        // The temporary file has mode 0600. If this function returns early, its destructor removes the file.
        let prefix = format!(".{}.", self.name);
        let mut file = tempfile::Builder::new().prefix(&prefix).suffix(".tmp").tempfile_in(&self.directory)?;
        file.write_all(text)?;
        if let Some(group) = self.group {
            fchown(file.as_file(), None, Some(group.as_raw()))?;
        }
        file.as_file().set_permissions(Permissions::from_mode(MODE))?;
        file.persist(&self.file).map_err(|failed| failed.error)?;
        Ok(())
    }

    /// Returns the error about a file that gpushctl cannot write. `is_root` is whether gpushctl runs as root.
    fn unwritable(&self, cause: &io::Error, is_root: bool) -> ApiError {
        let error = exit::io(format!("cannot write {}", self.file.display()), cause);
        if cause.kind() == io::ErrorKind::PermissionDenied {
            let at = self.directory.display();
            if is_root {
                // Permissions do not stop root.
                return error.hint(format!(
                    "`lsattr -d {at} {}` shows whether one is immutable, and `findmnt -T {at}` how {at} is mounted",
                    self.file.display()
                ));
            }
            return error.hint(match self.group {
                Some(_) => format!("run the command as root, or as a user who can write to {at} and is in the group"),
                None => format!("run the command as a user who can write to {at}, such as root"),
            });
        }
        error
    }
}

const DIRECTORY: &str =
    "name a file in the directory that node_exporter reads (its option --collector.textfile.directory)";

/// Returns the gid of a group, given as a name or a number.
fn gid(name: &str) -> Result<Gid, ApiError> {
    if let Ok(number) = name.parse() {
        return Ok(Gid::from_raw(number));
    }
    match Group::from_name(name) {
        Ok(Some(group)) => Ok(group.gid),
        Ok(None) => Err(ApiError::new(Code::BadRequest, format!("this host has no group {name:?}"))
            .hint("name the group of node_exporter, as a name or a gid")),
        Err(errno) => {
            Err(ApiError::new(Code::Internal, format!("cannot look up group {name:?}")).cause(errno.to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::args::MetricsSelection;

    fn textfile(file: PathBuf, group: Option<&str>) -> Result<Textfile, ApiError> {
        let selection = MetricsSelection { public: false };
        Textfile::check(&MetricsWriteArgs { file, group: group.map(str::to_owned), selection })
    }

    fn names(directory: &Path) -> Vec<String> {
        let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn file_is_replaced_with_mode_0640_and_the_group() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("gpush.prom");
        fs::write(&file, "a longer old text\n").unwrap();
        let group = nix::unistd::getegid().to_string();
        textfile(file.clone(), Some(&group)).unwrap().replace(b"new\n").unwrap();
        let now = fs::metadata(&file).unwrap();
        assert_eq!((now.mode() & 0o7777, now.gid().to_string()), (0o640, group));
        assert_eq!(fs::read(&file).unwrap(), b"new\n");
        assert_eq!(names(scratch.path()), ["gpush.prom"]);
    }

    /// The rename fails, because the path has become a directory.
    #[test]
    fn failed_replacement_leaves_no_temporary_file() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("gpush.prom");
        let textfile = textfile(file.clone(), None).unwrap();
        fs::create_dir(&file).unwrap();
        fs::write(file.join("kept"), "").unwrap();
        let error = textfile.replace(b"new\n").unwrap_err();
        assert!(textfile.unwritable(&error, false).message.contains("gpush.prom"));
        assert_eq!((names(scratch.path()), names(&file)), (vec!["gpush.prom".to_owned()], vec!["kept".to_owned()]));
    }

    #[test]
    fn error_without_permission_names_who_can_write() {
        let scratch = tempfile::tempdir().unwrap();
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        for (group, part) in [(None, "such as root"), (Some("0"), "is in the group")] {
            let error = textfile(scratch.path().join("gpush.prom"), group).unwrap().unwritable(&denied, false);
            assert_eq!(error.code, Code::Denied);
            assert!(error.hint.unwrap().contains(part));
        }
    }

    /// Fault: for an immutable file, the hint asked root to run the command as root.
    #[test]
    fn root_without_permission_learns_of_immutable_files() {
        let scratch = tempfile::tempdir().unwrap();
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = textfile(scratch.path().join("gpush.prom"), None).unwrap().unwritable(&denied, true);
        let hint = error.hint.unwrap();
        assert!(hint.contains("lsattr") && !hint.contains("root"), "{hint}");
    }

    #[test]
    fn directory_in_which_every_user_can_write_is_reported() {
        let scratch = tempfile::tempdir().unwrap();
        let textfile = textfile(scratch.path().join("gpush.prom"), None).unwrap();
        for (mode, is_reported) in [(0o755, false), (0o775, false), (0o777, true), (0o1777, false)] {
            fs::set_permissions(scratch.path(), Permissions::from_mode(mode)).unwrap();
            assert_eq!(textfile.shared_directory().is_some(), is_reported, "{mode:o}");
        }
    }

    #[test]
    fn bad_arguments_are_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        fs::create_dir(at("dir.prom")).unwrap();
        fs::write(at("file"), "").unwrap();
        for (file, part) in [
            (at("gpush.txt"), "does not end with .prom"),
            (at(".prom"), "does not end with .prom"),
            (PathBuf::from("/"), "does not end with .prom"),
            (at("none/gpush.prom"), "none does not exist"),
            (at("file/gpush.prom"), "file is not a directory"),
            (at("dir.prom"), "it is a directory"),
        ] {
            let error = textfile(file, None).err().unwrap();
            assert!(error.message.contains(part) && error.hint.is_some(), "{error:?}");
        }
        let error = textfile(at("gpush.prom"), Some("no-such-group")).err().unwrap();
        assert!(error.message.contains("no group \"no-such-group\""), "{error:?}");
    }
}
