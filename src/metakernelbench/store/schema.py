"""The tables of a store. One database holds any number of experiments; large texts are in the artifacts folder.

    schema_version    one row: the version of this layout, and who made it
    experiments       an experiment as last run: its resolved specification and its plan (an artifact)
    attempts          one row a finished attempt; a row that a later run replaced stays, marked as superseded
    rematches         one row a comparison whose two kernels were timed head to head; replaced rows stay as well
    answers           one row an answer of an annotator, found again by the digest of what was asked
    faults            what of ours went wrong, try by try; never a result
    leases            which runner is at which attempt, and until when without a sign of life

Plain tables and statements that SQLite and PostgreSQL both understand: which of them it is depends on the URL alone.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text, text

SCHEMA_VERSION = 3
"""Raised whenever the tables change. A store of a newer version is refused, one of an older is brought up to date.

2: rematches
3: answers
"""

metadata = MetaData()

schema_version = Table(
    "schema_version",
    metadata,
    Column("version", Integer, nullable=False),
    Column("made_by", String, nullable=False),
)

experiments = Table(
    "experiments",
    metadata,
    Column("name", String, primary_key=True),
    Column("spec", Text, nullable=False),
    Column("plan", String, nullable=False),
    Column("created_at", String, nullable=False),
    Column("updated_at", String, nullable=False),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("experiment", String, nullable=False),
    Column("key", String, nullable=False),
    Column("task", String, nullable=False),
    Column("attached", String),
    Column("contract_version", Integer, nullable=False),
    Column("ended", String, nullable=False),
    Column("passed", Boolean),
    Column("speedup", Float),
    Column("skill", String),
    Column("record", Text, nullable=False),
    Column("started_at", String, nullable=False),
    Column("finished_at", String, nullable=False),
    Column("superseded_at", String),
)
"""`task` is the fingerprint of the task without a source skill, `attached` the digest of the source skill that the
attempt was given, `skill` that of the skill it kept; `passed` is NULL where nothing was judged."""

Index(
    "one_current_record",
    attempts.c.experiment,
    attempts.c.key,
    unique=True,
    sqlite_where=text("superseded_at IS NULL"),
    postgresql_where=text("superseded_at IS NULL"),
)

rematches = Table(
    "rematches",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("experiment", String, nullable=False),
    Column("baseline", String, nullable=False),
    Column("treatment", String, nullable=False),
    Column("ratio", Float),
    Column("low", Float),
    Column("high", Float),
    Column("reason", Text),
    Column("baseline_sha256", String, nullable=False),
    Column("treatment_sha256", String, nullable=False),
    Column("workload", String, nullable=False),
    Column("device", String, nullable=False),
    Column("judge", String, nullable=False),
    Column("contract_version", Integer, nullable=False),
    Column("versions", Text, nullable=False),
    Column("measurement", Text, nullable=False),
    Column("measured_at", String, nullable=False),
    Column("superseded_at", String),
)
"""`versions` and `measurement` are JSON; `reason` says why `ratio` is NULL."""

Index(
    "one_current_rematch",
    rematches.c.experiment,
    rematches.c.baseline,
    rematches.c.treatment,
    unique=True,
    sqlite_where=text("superseded_at IS NULL"),
    postgresql_where=text("superseded_at IS NULL"),
)

answers = Table(
    "answers",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("request", String, nullable=False, unique=True),
    Column("question", String, nullable=False),
    Column("subject", String, nullable=False, index=True),
    Column("annotator", String, nullable=False),
    Column("pass_number", Integer, nullable=False),
    Column("words_version", Integer, nullable=False),
    Column("prompt_version", String),
    Column("temperature", Float),
    Column("labels", Text, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("input_tokens", Integer),
    Column("output_tokens", Integer),
    Column("cost_usd", Float),
    Column("answered_at", String, nullable=False),
)

faults = Table(
    "faults",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("experiment", String, nullable=False, index=True),
    Column("key", String, nullable=False),
    Column("try_number", Integer, nullable=False),
    Column("gave_up", Boolean, nullable=False),
    Column("message", Text, nullable=False),
    Column("at", String, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("experiment", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("owner", String, nullable=False, index=True),
    Column("expires_at", Float, nullable=False),
)
