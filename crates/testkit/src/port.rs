//! Free ports of 127.0.0.1, outside of the range from which the system serves outgoing connections.

use std::net::TcpListener;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};

/// The first port that is handed out.
const PORT_FIRST: u32 = 20_000;
/// How many ports there are to hand out. Linux serves outgoing connections from 32768 on.
const PORTS: u32 = 12_000;
/// How many ports are tried before giving up.
const TRIES_MAX: u32 = 1_000;

/// A port on which nothing listens now. Another process may still take it first: whoever uses it tries again on a clash.
///
/// # Errors
/// When no port of the range is free.
pub fn free() -> Result<u16> {
    free_with(0)
}

/// Like [`free`], and the port so far above it is free as well.
///
/// # Errors
/// When there are no such two.
pub fn free_with(distance: u16) -> Result<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // One start a process, so that no port is handed out twice before all others were.
    static START: OnceLock<u32> = OnceLock::new();
    let start = *START.get_or_init(|| {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
        std::process::id().wrapping_mul(61).wrapping_add(clock)
    });
    for _ in 0..TRIES_MAX {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = u16::try_from(PORT_FIRST + start.wrapping_add(step.wrapping_mul(7)) % PORTS)?;
        let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if free(port) && (distance == 0 || free(port + distance)) {
            return Ok(port);
        }
    }
    bail!("no free port between {PORT_FIRST} and {} on 127.0.0.1", PORT_FIRST + PORTS)
}
