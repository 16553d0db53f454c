//! The files from which QEMU boots: the kernel, and a small root that finds the disk.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::host::program;

/// Debian packages of the programs that make and run the machine, and of its kernel. They are unpacked, not installed:
/// QEMU conflicts with newer QEMU packages of the host, and the installation of a kernel would make an initrd.
pub(in crate::machine) const PACKAGES: &str = "qemu-system-x86,linux-image-cloud-amd64,busybox-static,e2fsprogs,zstd";

/// Kernel modules of the machine, in the order of their dependencies. Everything else is part of the kernel.
const MODULES: [&str; 5] = [
    "drivers/block/virtio_blk",
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
    "fs/fuse/cuse",
];

/// The files of the saved machine.
#[derive(Debug)]
pub(super) struct Saved {
    pub(super) tools: Tools,
    pub(super) dir: PathBuf,
}

impl Saved {
    pub(super) fn disk(&self) -> PathBuf {
        self.dir.join("disk.img")
    }

    pub(super) fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    pub(super) fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinux")
    }

    pub(super) fn initrd(&self) -> PathBuf {
        self.dir.join("initrd")
    }
}

/// The port of `machine_exec` in the machine.
pub(super) const PORT: u16 = 4000;

/// The program in the machine that executes commands.
const EXEC: &str = "usr/local/sbin/machine_exec";

/// The first program of the machine. Then, systemd continues.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mkdir -p /proc /dev /disk
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*; do /bin/busybox insmod "$module" || echo "$module was not loaded"; done
until [ -b /dev/vda ]; do /bin/busybox sleep 0.05; done
/bin/busybox mount -t ext4 /dev/vda /disk
/bin/busybox cp -a /files/. /disk/
until /bin/busybox ip link set eth0 up; do /bin/busybox sleep 0.05; done 2>/dev/null
/bin/busybox ip link set lo up
/bin/busybox ip addr add 10.0.2.15/24 dev eth0
/bin/busybox chroot /disk /EXEC serve PORT &
/bin/busybox umount /proc
exec /bin/busybox switch_root /disk /sbin/init
"#;

/// The programs and the kernel, unpacked in a directory.
#[derive(Debug)]
pub(super) struct Tools(pub(super) PathBuf);

impl Tools {
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns a command that runs an unpacked program with the libraries of its release.
    pub(super) fn command(&self, name: &str) -> Command {
        self.through(Command::new(self.loader()), name)
    }

    /// Does the same as [`Tools::command`]. When the calling thread ends, the program is killed.
    pub(super) fn killed_with_caller(&self, name: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(self.loader());
        self.through(command, name)
    }

    fn loader(&self) -> PathBuf {
        self.path("usr/lib64/ld-linux-x86-64.so.2")
    }

    fn through(&self, mut loader: Command, name: &str) -> Command {
        let library = self.path("usr/lib/x86_64-linux-gnu");
        let program = ["usr/bin", "usr/sbin"].map(|directory| self.path(directory).join(name));
        let program = program.iter().find(|path| path.is_file()).unwrap_or(&program[0]).clone();
        loader.arg("--library-path").arg(&library).arg(program);
        loader.env("QEMU_MODULE_DIR", library.join("qemu")).env("MKE2FS_CONFIG", self.path("etc/mke2fs.conf"));
        loader
    }

    /// Returns the version of the kernel.
    pub(super) fn kernel(&self) -> Result<String, String> {
        let mut names = fs::read_dir(self.path("usr/lib/modules")).into_iter().flatten().flatten();
        let name = names.next().map(|entry| entry.file_name().to_string_lossy().into_owned());
        name.ok_or_else(|| "the package of the kernel has no modules".to_owned())
    }

    /// Makes an image of an ext4 file system with the files of a directory.
    pub(super) fn image(&self, files: &Path, image: &Path, size: &str) -> Result<(), String> {
        let mut command = self.command("mke2fs");
        command.args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1", "-d"]);
        succeed(command.arg(files).arg(image).arg(size)).map(drop)
    }
}

/// Runs a command. Returns its output.
pub(super) fn succeed(command: &mut Command) -> Result<Vec<u8>, String> {
    fed(command, &[])
}

/// Runs a command with this input. Returns its output.
fn fed(command: &mut Command, input: &[u8]) -> Result<Vec<u8>, String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        scope.spawn(|| stdin.map(|mut stdin| stdin.write_all(input)));
        child.wait_with_output()
    });
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim_end()))
}

/// Unpacks the kernel. QEMU starts an unpacked kernel without firmware, and so without the slow decompression in the
/// machine.
pub(super) fn unpack_kernel(tools: &Tools, file: &Path) -> Result<(), String> {
    let packed = tools.path("boot").join(format!("vmlinuz-{}", tools.kernel()?));
    let packed = fs::read(&packed).map_err(|error| format!("{}: {error}", packed.display()))?;
    // The boot protocol of x86: the number of sectors before the kernel, the offset of its payload, and the length.
    let number = |at: usize| packed.get(at..at + 4).and_then(|bytes| Some(u32::from_le_bytes(bytes.try_into().ok()?)));
    let payload = || {
        let sectors = usize::from(*packed.get(0x1f1)?);
        let start = (sectors + 1) * 512 + usize::try_from(number(0x248)?).ok()?;
        packed.get(start..start + usize::try_from(number(0x24c)?).ok()?)
    };
    // After the compressed kernel, the payload has its unpacked size in four bytes.
    let (payload, _) = payload()
        .and_then(|payload| payload.split_at_checked(payload.len().checked_sub(4)?))
        .ok_or("the kernel is shorter than its header says")?;
    let kernel = fed(tools.command("zstd").arg("-dcq"), payload)?;
    if !kernel.starts_with(b"\x7fELF") {
        return Err("the kernel is not packed with zstd".to_owned());
    }
    fs::write(file, kernel).map_err(|error| format!("{}: {error}", file.display()))
}

/// Makes the small root, with which the machine finds its disk.
pub(super) fn initrd(tools: &Tools, file: &Path) -> Result<(), String> {
    let files = tempfile::tempdir().map_err(|error| error.to_string())?;
    let root = files.path();
    let modules = tools.path("usr/lib/modules").join(tools.kernel()?).join("kernel");
    let write = |name: &str, content: &[u8]| {
        let path = root.join(name);
        let made = fs::create_dir_all(path.parent().unwrap_or(root)).and_then(|()| fs::write(&path, content));
        made.map_err(|error| format!("{}: {error}", path.display()))
    };
    let busybox = tools.path("usr/bin/busybox");
    write("bin/busybox", &fs::read(&busybox).map_err(|error| format!("{}: {error}", busybox.display()))?)?;
    write("init", INIT.replace("EXEC", EXEC).replace("PORT", &PORT.to_string()).as_bytes())?;
    for (number, module) in MODULES.iter().enumerate() {
        let packed = modules.join(format!("{module}.ko.xz"));
        write(&format!("modules/{number}.ko"), &succeed(Command::new(&busybox).args(["xz", "-dc"]).arg(&packed))?)?;
    }
    write("files/etc/hostname", b"vm\n")?;
    write("files/etc/hosts", b"127.0.0.1 localhost vm\n")?;
    write(&format!("files/{EXEC}"), &[])?;
    succeed(Command::new("strip").arg("-o").arg(root.join("files").join(EXEC)).arg(program("machine_exec")))?;
    let executable = format!("chmod 755 init bin/busybox files/{EXEC} && find . | \"$0\" cpio -o -H newc");
    let packed = succeed(Command::new("sh").args(["-ec", &executable]).arg(&busybox).current_dir(root))?;
    fs::write(file, packed).map_err(|error| format!("{}: {error}", file.display()))
}
