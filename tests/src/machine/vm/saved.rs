//! The saved machine: booted once, and stored below the target directory.
//!
//! It is built again if its kernel, its root or the programs that build it change. A state can only be loaded with the same
//! version and arguments of QEMU.

use std::{
    fs,
    path::Path,
    sync::OnceLock,
    time::{Duration, Instant},
};

use nix::fcntl::{Flock, FlockArg};

use super::{
    Vm,
    files::{self, Saved, Tools, succeed},
    programs,
    qemu::{Disk, Writes},
};
use crate::{
    host::program,
    machine::{Debian, container, root},
};

/// Maximum duration of the boot, on a busy host with two processors.
const BOOT: Duration = Duration::from_secs(240);

/// Size of the disk. The file is sparse.
const SIZE: &str = "1500M";

/// Settles a booted machine: all units have started, and all files are written. Cached files would only make the state
/// larger.
const SETTLE: &str =
    "systemctl is-system-running --wait | grep -qE 'running|degraded' && sync && echo 3 > /proc/sys/vm/drop_caches";

/// Returns the saved machine. The first call makes it. If this host cannot run it, every caller gets the reason.
///
/// # Panics
/// If the machine does not boot.
pub(super) fn saved() -> Result<&'static Saved, String> {
    static SAVED: OnceLock<Result<Saved, String>> = OnceLock::new();
    SAVED.get_or_init(made).as_ref().map_err(Clone::clone)
}

fn made() -> Result<Saved, String> {
    container::able()?;
    let tools = Tools(root::unpacked("machine-vm-tools", files::PACKAGES)?);
    let root = root::root(Debian::Trixie)?;
    let dir = root::target()?.join("machine-vm");
    let why = |error: std::io::Error| format!("{}: {error}", dir.display());
    fs::create_dir_all(&dir).map_err(why)?;
    let lock = fs::File::create(dir.join("lock")).map_err(why)?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| why(error.into()))?;
    let saved = Saved { tools, dir: dir.clone() };
    let (note, wanted) = (dir.join("recipe"), recipe(&saved.tools, root)?);
    if fs::read_to_string(&note).is_ok_and(|recipe| recipe == wanted) {
        return Ok(saved);
    }
    let begun = Instant::now();
    // Remove the recipe first. If this run does not finish, the next run begins again.
    let _ = fs::remove_file(&note);
    files::unpack_kernel(&saved.tools, &saved.kernel())?;
    files::initrd(&saved.tools, &saved.initrd())?;
    let disk = saved.disk();
    let _ = fs::remove_file(&disk);
    saved.tools.image(root, &disk, SIZE)?;
    let programs = dir.join("no-programs.img");
    programs::empty(&saved.tools, &programs)?;
    let root = Disk { file: &disk, writes: Writes::Kept };
    let mut vm = Vm::boot(&saved, &root, &Disk { file: &programs, writes: Writes::Refused })?;
    // QEMU works here, so a machine that does not boot is an error, not a reason to skip a test.
    vm.run_until(SETTLE, BOOT).unwrap_or_else(|why| panic!("the virtual machine does not boot: {why}"));
    let booted = begun.elapsed();
    vm.qemu.save(&saved.state())?;
    fs::write(&note, wanted).map_err(why)?;
    let total = begun.elapsed().as_secs_f64();
    println!("a virtual machine was booted in {:.1} s, and saved in {total:.1} s", booted.as_secs_f64());
    Ok(saved)
}

/// Returns what the saved machine depends on.
fn recipe(tools: &Tools, root: &Path) -> Result<String, String> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let version = succeed(tools.command("qemu-system-x86_64").arg("--version"))?;
    let mut hasher = DefaultHasher::new();
    for file in [program("machine_exec"), root.with_file_name("recipe"), tools.0.with_file_name("recipe")] {
        let content = fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let changed = fs::metadata(&file).and_then(|found| found.modified()).map_err(|error| error.to_string())?;
        (content, file.ends_with("recipe").then_some(changed)).hash(&mut hasher);
    }
    for source in [include_str!("files.rs"), include_str!("qemu.rs"), SIZE, SETTLE, programs::SIZE] {
        source.hash(&mut hasher);
    }
    let version = String::from_utf8_lossy(&version);
    Ok(format!("{} {} {:x}\n", version.lines().next().unwrap_or_default(), tools.kernel()?, hasher.finish()))
}
