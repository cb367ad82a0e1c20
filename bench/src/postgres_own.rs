//! The two statements of a fresh task as the store sends them, sent bare: what is left of a task without the library around it.

use anyhow::{Result, bail, ensure};
use taskonce::{Admission, Output};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::postgres_stage::{Bare, Stage};
use crate::setup::{self, run_once};

/// How long the body of a record is that has no output, about.
const BODY_BYTES: usize = 100;
/// A day, which a record stays.
const RETENTION_MS: i64 = 86_400_000;

/// A connection with the store's statements.
pub(crate) struct Own {
    client: Client,
    claim: Statement,
    end: Statement,
    body: Vec<u8>,
}

impl Own {
    /// Asks the server what the ledger's connection sent last.
    pub(crate) async fn open(stage: &Stage) -> Result<Own> {
        let [task, other] = &setup::tasks(2)?[..] else { unreachable!("two were asked for") };
        let Admission::Run(claim) = stage.ledger.claim(task, &stage.policy).await? else {
            bail!("the task was not fresh")
        };
        let inserts = sent(stage, "insert into")?;
        drop(claim.complete(Output::Nothing).await);
        let updates = sent(stage, "update")?;
        run_once(&stage.ledger, other, &stage.policy).await?;
        let client = Bare::connect(&stage.url()).await?;
        client.batch_execute("set enable_seqscan = off; set jit = off").await?;
        let types = [
            Type::TEXT,
            Type::UUID,
            Type::UUID,
            Type::UUID,
            Type::INT8,
            Type::INT2,
            Type::INT4,
            Type::TEXT,
            Type::INT2,
            Type::INT8,
            Type::INT8,
            Type::INT8,
            Type::INT8,
            Type::TEXT,
            Type::BYTEA,
            Type::BYTEA,
        ];
        let claim = client.prepare_typed(&inserts, &types).await?;
        let end = client.prepare_typed(&updates, &types).await?;
        Ok(Own { client, claim, end, body: vec![b'x'; BODY_BYTES] })
    }

    /// A claim and an end, with values as the store's.
    pub(crate) async fn pair(&self, key: &str) -> Result<()> {
        const RUNNING: i16 = 1;
        const DONE: i16 = 3;
        let (token, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let fence = self.send(&self.claim, key, None, token, 0, RUNNING, None).await?;
        self.send(&self.end, key, Some(token), next, fence, DONE, Some(RETENTION_MS)).await.map(drop)
    }

    #[expect(clippy::too_many_arguments, reason = "the values of a row that differ between the two")]
    async fn send(
        &self,
        statement: &Statement,
        key: &str,
        expected: Option<Uuid>,
        token: Uuid,
        fence: i64,
        state: i16,
        expires_after: Option<i64>,
    ) -> Result<i64> {
        let nothing: (Option<i64>, Option<&str>, Option<&[u8]>) = (None, None, None);
        let values: [&(dyn ToSql + Sync); 16] = [
            &key,
            &expected,
            &token,
            &Uuid::from_u128(3),
            &fence,
            &state,
            &1_i32,
            &"bench-1",
            &2_i16,
            &RETENTION_MS,
            &RETENTION_MS,
            &expires_after,
            &nothing.0,
            &nothing.1,
            &nothing.2,
            &self.body,
        ];
        let rows = self.client.query(statement, &values).await?;
        ensure!(rows.len() == 1, "{} rows", rows.len());
        Ok(rows[0].try_get(0)?)
    }
}

/// The last statement of the ledger's connection, which holds this.
fn sent(stage: &Stage, part: &str) -> Result<String> {
    let ask = format!(
        "select query from pg_stat_activity where query like '%{part}%' and query like '%\"taskonce\".task%'
         and pid <> pg_backend_pid() order by state_change desc limit 1"
    );
    let text = stage.psql(&ask)?;
    ensure!(!text.trim().is_empty(), "no connection sent an `{part}`");
    Ok(text.trim().to_owned())
}
