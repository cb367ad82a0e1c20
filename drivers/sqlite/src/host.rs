//! What the host says of the place where the file lies: the kind of its file system, its room, its permissions.
//!
//! Asked by path only. The file itself is never opened here: closing it would drop SQLite's locks on it.

use std::path::Path;

/// What matters of the file system under a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// A local one, or one that the host cannot tell.
    Local,
    /// Reached over a network or from a virtual machine's host, by its name. Memory shared through it does not work.
    Remote(&'static str),
    /// In memory: gone after a restart of the host.
    Volatile(&'static str),
}

/// Room and state of a file system.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Bytes left for this user.
    pub free: u64,
    /// Whether it is mounted read-only.
    pub read_only: bool,
}

/// Magic numbers of `statfs(2)`, from the kernel's `linux/magic.h` and the file systems' own headers.
#[cfg(target_os = "linux")]
const MAGIC: [(u32, FileSystem); 12] = [
    (0x0000_6969, FileSystem::Remote("nfs")),
    (0xff53_4d42, FileSystem::Remote("cifs")),
    (0xfe53_4d42, FileSystem::Remote("smb2")),
    (0x0000_517b, FileSystem::Remote("smb")),
    (0x0102_1997, FileSystem::Remote("9p")),
    (0x5346_414f, FileSystem::Remote("afs")),
    (0x7375_7245, FileSystem::Remote("coda")),
    (0x00c3_6400, FileSystem::Remote("ceph")),
    (0x0bd0_0bd0, FileSystem::Remote("lustre")),
    (0x786f_4256, FileSystem::Remote("vboxsf")),
    (0x0102_1994, FileSystem::Volatile("tmpfs")),
    (0x8584_58f6, FileSystem::Volatile("ramfs")),
];

/// The file system under a path.
#[cfg(target_os = "linux")]
pub fn file_system(path: &Path) -> FileSystem {
    let Ok(found) = rustix::fs::statfs(path) else { return FileSystem::Local };
    let magic = found.f_type as u32;
    MAGIC.iter().find(|(known, _)| *known == magic).map_or(FileSystem::Local, |(_, kind)| *kind)
}

/// The file system under a path.
#[cfg(not(target_os = "linux"))]
pub fn file_system(_path: &Path) -> FileSystem {
    FileSystem::Local
}

/// The room under a path, where the host tells.
#[cfg(unix)]
pub fn room(path: &Path) -> Option<Room> {
    let found = rustix::fs::statvfs(path).ok()?;
    Some(Room {
        free: found.f_bavail.saturating_mul(found.f_frsize),
        read_only: found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY),
    })
}

/// The room under a path, where the host tells.
#[cfg(not(unix))]
pub fn room(_path: &Path) -> Option<Room> {
    None
}

/// Whether this user may write to a file or into a folder, as far as the host tells.
#[cfg(unix)]
pub fn may_write(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Whether this user may write to a file or into a folder, as far as the host tells.
#[cfg(not(unix))]
pub fn may_write(_path: &Path) -> bool {
    true
}

/// What there is at a path in the place of a file, links followed: a pipe, a socket or a device.
#[cfg(unix)]
pub fn no_file(path: &Path) -> Option<&'static str> {
    use std::os::unix::fs::FileTypeExt as _;
    // What cannot be looked at is told better by opening it.
    let kind = std::fs::metadata(path).ok()?.file_type();
    if kind.is_fifo() {
        Some("a pipe")
    } else if kind.is_socket() {
        Some("a socket")
    } else if kind.is_char_device() || kind.is_block_device() {
        Some("a device")
    } else {
        None
    }
}

/// What there is at a path in the place of a file.
#[cfg(not(unix))]
pub fn no_file(_path: &Path) -> Option<&'static str> {
    None
}

/// What makes a file writable that is not.
pub fn write_hint(path: &Path) -> String {
    if room(folder(path)).is_some_and(|room| room.read_only) {
        return "mount the file system writable".to_owned();
    }
    format!("give this user the right to write to `{}` and to its folder", path.display())
}

/// The folder of a file.
pub fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_in_memory_is_told_from_a_local_one() {
        assert!(matches!(file_system(Path::new("/dev/shm")), FileSystem::Volatile("tmpfs")));
        assert_eq!(file_system(Path::new("/proc")), FileSystem::Local);
        assert!(room(Path::new("/")).is_some_and(|room| room.free > 0));
    }
}
