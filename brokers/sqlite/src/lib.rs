//! The embedded queue: one SQLite file, any number of processes on one host.
//!
//! # What it promises
//!
//! * **Durable.** What was accepted, settled or handed out is in the file, and the disk has been told to keep it, before a call
//!   answers ([`Synchronous::Full`], the default). With [`Synchronous::Normal`] a power cut may take back the last of it:
//!   deliveries come again then, and what was sent last may be lost.
//! * **One holder**, judged by the host's clock, in milliseconds, which all processes of a host share. A clock that goes back
//!   by more than a second takes all times of the file with it, so that nothing waits for longer than it was told. When it
//!   jumps ahead, what is deferred or in flight comes too early by as much; the ledger then says busy or waiting.
//! * **In order.** By priority, then by the order of sending, which what comes again keeps. Handlers are served in turn.
//! * **Bounded.** What is acknowledged is deleted, and its room used again. The file shrinks by a `VACUUM` only.
//! * **Soon.** A receive that waits is woken at once by a send through the same handle, and looks every [`WAKE_MAX`] for what others sent.
//!
//! What a receive was given and nobody took, because its future was dropped, is given back at once.
//!
//! # What it needs
//!
//! A local file system, a file of its own (not the ledger's), and nothing that writes to it with an older SQLite: as for
//! the store in a SQLite file. A tokio runtime with timers, where a receive waits.
//!
//! ```no_run
//! use std::time::Duration;
//! use taskonce_queue_sqlite::SqliteQueue;
//! use taskonce_worker::source::{Entrance, Envelope, Source, Want};
//!
//! # async fn example() -> taskonce_core::Result<()> {
//! let queue = SqliteQueue::from_url("sqlite:///var/lib/shop/queue.db?visibility=30s")?;
//! let task = Envelope { key: Some("shop/charge@2/invoice-42".into()), ..Envelope::new("charge@2", r#"{"amount": 12}"#) };
//! let _sent = queue.send(&task, Duration::ZERO, Entrance::OncePerKey).await?;
//! let wants = [Want { handler: "charge@2".into(), max: 10 }];
//! for delivery in queue.receive(&wants, 10, Duration::from_secs(5)).await? {
//!     let _settled = queue.acknowledge(&delivery.receipt).await?;
//! }
//! # Ok(())
//! # }
//! ```

mod options;
mod read;
mod rows;
mod source;
mod take;
mod write;

pub use options::{NAME_DEFAULT, QueueOptions, VISIBILITY_DEFAULT};
pub use source::{PAYLOAD_MAX, SqliteQueue, WAKE_MAX};
pub use taskonce_sqlite_file::{Clock, Options, Synchronous};
