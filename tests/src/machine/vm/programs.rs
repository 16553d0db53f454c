//! The disk with the built programs and the checkout, which each resumed machine mounts.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Instant,
};

use super::files::{Saved, Tools, succeed};
use crate::machine::guest::{built, repository};

/// Size of the disk. A resumed machine expects the size of the saved one. The file is sparse.
pub(super) const SIZE: &str = "384M";

/// The programs that machines use, without the lines of their source.
const PROGRAMS: [&str; 6] = ["gpushd", "gpushctl", "gpush-slurm-hook", "gpush-sim", "libnvidia_ml.so", "device_opens"];

/// Copies the files of the checkout that docs/install.md names. `0` is the target.
const COPY: &str = r#"mkdir -p "$0" && cp -r --parents systemd packaging docs *.md *.toml sim/*.md sim/*/*.md "$0""#;

/// Returns the disk. The first call makes it. If it cannot be made, every caller gets the error.
pub(super) fn image(saved: &Saved) -> Result<PathBuf, String> {
    static IMAGE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    IMAGE.get_or_init(|| made(saved)).clone()
}

fn made(saved: &Saved) -> Result<PathBuf, String> {
    let begun = Instant::now();
    // Another test program may use an older disk at the moment. So give this disk its own file.
    let files = tempfile::tempdir_in(&saved.dir).map_err(|error| error.to_string())?;
    let root = files.path().join("root");
    fs::create_dir_all(root.join("built")).map_err(|error| error.to_string())?;
    for name in PROGRAMS {
        let (from, to) = (built().join(name), root.join("built").join(name));
        succeed(Command::new("strip").arg("--strip-debug").arg("-o").arg(to).arg(from))?;
    }
    succeed(Command::new("sh").args(["-ec", COPY]).arg(root.join("gpush")).current_dir(repository()))?;
    let (made, image) = (files.path().join("image"), saved.dir.join("programs.img"));
    saved.tools.image(&root, &made, SIZE)?;
    fs::rename(&made, &image).map_err(|error| format!("{}: {error}", image.display()))?;
    println!("the disk with the built programs was made in {:.1} s", begun.elapsed().as_secs_f64());
    Ok(image)
}

/// Makes an empty disk.
pub(super) fn empty(tools: &Tools, image: &Path) -> Result<(), String> {
    let files = tempfile::tempdir().map_err(|error| error.to_string())?;
    tools.image(files.path(), image, SIZE)
}
