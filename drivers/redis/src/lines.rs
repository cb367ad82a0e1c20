//! Connections that are kept for questions beside the calls: one to each Sentinel, or to each of several hosts. So a
//! question costs them a command, not a connection.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Mutex;

use crate::address::Address;
use crate::dial::exchange;
use crate::fault::Refusal;
use crate::pipe::Wire;
use crate::shared::lock;
use crate::wire::{Commands, Reply};

/// The connections that are not in use, at most one to each server that the URL names.
#[derive(Default)]
pub(crate) struct Lines {
    idle: Mutex<HashMap<Address, Box<dyn Wire>>>,
}

impl Lines {
    /// Asks on the kept connection, or where there is none that works, on a new one. A question that is given up on the
    /// way takes its connection along.
    pub(crate) async fn ask<F>(
        &self,
        address: &Address,
        commands: &Commands,
        connect: impl FnOnce() -> F,
    ) -> Result<Vec<Reply>, Refusal>
    where
        F: Future<Output = Result<Box<dyn Wire>, Refusal>>,
    {
        let kept = lock(&self.idle).remove(address);
        if let Some(wire) = kept
            && let Ok(replies) = self.ask_on(address, commands, wire).await
        {
            return Ok(replies);
        }
        self.ask_on(address, commands, connect().await?).await
    }

    async fn ask_on(
        &self,
        address: &Address,
        commands: &Commands,
        mut wire: Box<dyn Wire>,
    ) -> Result<Vec<Reply>, Refusal> {
        let replies = exchange(&mut wire, commands).await?;
        // One that was refused may be heard on a connection that is made anew.
        if !replies.iter().any(|reply| matches!(reply, Reply::Error(_))) {
            lock(&self.idle).insert(address.clone(), wire);
        }
        Ok(replies)
    }
}
