//! A transaction that a test holds: a task of its own has the connection, and does what it is told.

use async_trait::async_trait;
use taskonce::postgres::tokio_postgres::Client;
use taskonce::postgres::{CompleteIn as _, Completion, Refused};
use taskonce::{Claim, Key, Output, Result};
use taskonce_contract::transactional::ByHand;
use tokio::sync::{mpsc, oneshot};

use crate::place::EFFECT;

pub(crate) struct Hand {
    asks: mpsc::Sender<Ask>,
}

enum Ask {
    Lock(Claim, oneshot::Sender<(Claim, Result<()>)>),
    Effect(Key, oneshot::Sender<()>),
    Complete(Claim, Output, oneshot::Sender<std::result::Result<Completion, Refused>>),
    Commit(oneshot::Sender<()>),
    RollBack(oneshot::Sender<()>),
}

impl Hand {
    pub(crate) fn new(client: Client) -> Hand {
        let (asks, told) = mpsc::channel(1);
        tokio::spawn(obey(client, told));
        Hand { asks }
    }

    async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> T {
        let (reply, answer) = oneshot::channel();
        assert!(self.asks.send(ask(reply)).await.is_ok(), "the transaction is held");
        answer.await.unwrap()
    }
}

/// Dropped in between, the transaction is rolled back.
async fn obey(mut client: Client, mut told: mpsc::Receiver<Ask>) {
    let tx = client.transaction().await.unwrap();
    while let Some(ask) = told.recv().await {
        // Whoever stopped waiting wants no answer.
        match ask {
            Ask::Lock(claim, reply) => {
                let locked = claim.lock_in(&tx).await;
                let _ = reply.send((claim, locked));
            }
            Ask::Effect(key, reply) => {
                tx.execute(EFFECT, &[&key.as_str()]).await.unwrap();
                let _ = reply.send(());
            }
            Ask::Complete(claim, output, reply) => {
                let _ = reply.send(claim.complete_in(&tx, output).await);
            }
            Ask::Commit(reply) => {
                tx.commit().await.unwrap();
                let _ = reply.send(());
                return;
            }
            Ask::RollBack(reply) => {
                tx.rollback().await.unwrap();
                let _ = reply.send(());
                return;
            }
        }
    }
}

#[async_trait]
impl ByHand for Hand {
    async fn lock(&mut self, claim: Claim) -> (Claim, Result<()>) {
        self.ask(|reply| Ask::Lock(claim, reply)).await
    }

    async fn add_effect(&mut self, key: &Key) {
        self.ask(|reply| Ask::Effect(key.clone(), reply)).await;
    }

    async fn complete(&mut self, claim: Claim, output: Output) -> std::result::Result<Completion, Refused> {
        self.ask(|reply| Ask::Complete(claim, output, reply)).await
    }

    async fn commit(self: Box<Self>) {
        self.ask(Ask::Commit).await;
    }

    async fn roll_back(self: Box<Self>) {
        self.ask(Ask::RollBack).await;
    }
}
