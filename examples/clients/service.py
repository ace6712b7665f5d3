"""An inventory service that admits fencing tokens, with FastAPI and SQLAlchemy 2 over psycopg 3.

    uvicorn service:app

DATABASE_URL is the URL of a Postgres database with the fence and the table in
`examples/drivers/inventory.sql`.
"""

import json
import logging
import os
from contextlib import contextmanager, suppress
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Path, Request
from fastapi.responses import JSONResponse
from psycopg.pq import TransactionStatus
from pydantic import BaseModel, Field
from sqlalchemy import BigInteger, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

PROBLEMS = "https://docs.rs/tower-fence/latest/tower_fence/problem/#"
TOKEN_REQUIRED = (428, "token-required", "A fencing token is required")
FENCE_BUSY = (503, "fence-busy", "The resource is busy")
STORE_UNAVAILABLE = (503, "store-unavailable", "A store is unavailable")
TRANSACTION_ABORTED = (500, "transaction-aborted", "The transaction was aborted")
REFUSALS = {  # by SQLSTATE
    "TF400": (400, "malformed-token", "The fencing token is malformed"),
    "TF403": (403, "wrong-resource", "The fencing token is for another resource"),
    "TF412": (412, "stale-token", "The fencing token is stale"),
    "55P03": FENCE_BUSY,  # after the lock timeout
    "57014": FENCE_BUSY,  # after a statement timeout
    "40001": FENCE_BUSY,  # after too many concurrent writes
    "40P01": FENCE_BUSY,  # after a deadlock
    "08006": STORE_UNAVAILABLE,  # the connection failed
    "53300": STORE_UNAVAILABLE,  # the server has too many connections
    "57P01": STORE_UNAVAILABLE,  # the server is stopping
    "57P02": STORE_UNAVAILABLE,  # the server has crashed
    "57P03": STORE_UNAVAILABLE,  # the server is starting, or a shard has moved
    "57P05": STORE_UNAVAILABLE,  # the server has ended an idle session
    "25006": STORE_UNAVAILABLE,  # the server is read-only
    "25P03": STORE_UNAVAILABLE,  # after the timeout of an idle transaction
    "25P04": STORE_UNAVAILABLE,  # after the timeout of a transaction
}
TIMEOUTS = text(
    "SET LOCAL lock_timeout = '5s'; SET LOCAL idle_in_transaction_session_timeout = '15s'; "
    "SET LOCAL client_connection_check_interval = '1s'"
)

url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
engine = create_engine(url)
log = logging.getLogger("uvicorn.error")
app = FastAPI()


class Base(DeclarativeBase):
    pass


class Inventory(Base):
    __tablename__ = "inventory"
    sku: Mapped[str] = mapped_column(primary_key=True)
    stock: Mapped[int] = mapped_column(BigInteger)


class Stock(BaseModel):
    stock: int = Field(ge=0, le=2**63 - 1)


# The database does not accept control characters in the name of a resource.
Sku = Annotated[str, Path(pattern=r"^\P{Cc}+$")]
FencingToken = Annotated[list[str] | None, Header()]


class Refusal(Exception):
    """A refusal of the fence, which the service answers with a problem document."""

    def __init__(self, status, name, title, detail, **members):
        self.status = status
        problem = {"type": PROBLEMS + name, "title": title, "status": status, "detail": detail}
        self.problem = problem | members


class OutcomeUnknown(Refusal):
    """The reply to COMMIT was lost, so the write may or may not have been committed."""

    def __init__(self):
        detail = "the reply to COMMIT was lost"
        super().__init__(503, "outcome-unknown", "The outcome is unknown", detail)


@app.exception_handler(Refusal)
def answer_refusal(_request: Request, refusal: Refusal):
    headers = {"Cache-Control": "no-store"}
    if refusal.status == 503:
        headers["Retry-After"] = "1"
    return JSONResponse(refusal.problem, refusal.status, headers, "application/problem+json")


@app.exception_handler(DBAPIError)
def answer_database_error(request: Request, error: DBAPIError):
    """Answers a refusal by the fence, or an outage. Any other error is answered with 500."""
    sqlstate = sqlstate_of(error)
    if sqlstate not in REFUSALS:
        raise error
    if REFUSALS[sqlstate] == STORE_UNAVAILABLE:
        log.error("the database is unavailable: %s", error.orig)
        return answer_refusal(request, Refusal(*STORE_UNAVAILABLE, "the database is unavailable"))
    diagnostics = error.orig.diag
    members = json.loads(diagnostics.message_detail or "{}") if sqlstate.startswith("TF") else {}
    refusal = Refusal(*REFUSALS[sqlstate], diagnostics.message_primary, **members)
    return answer_refusal(request, refusal)


@app.exception_handler(PoolTimeoutError)
def answer_exhausted_pool(request: Request, _error: PoolTimeoutError):
    return answer_refusal(request, Refusal(*FENCE_BUSY, "all database connections are in use"))


def sqlstate_of(error: DBAPIError):
    """Returns the SQLSTATE of an error, or 08006 if the connection failed."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    if sqlstate is None:
        # If PgBouncer loses its server, psycopg raises an InternalError.
        is_lost = isinstance(error, (InternalError, OperationalError))
    else:
        is_lost = sqlstate.startswith("08")
    return "08006" if is_lost else sqlstate


# This is not a dependency of FastAPI, because the admission, the handler and the COMMIT would then
# be three jobs of the thread pool. While requests with a connection wait for a thread, the requests
# that wait for a connection could occupy all threads.
@contextmanager
def fenced(sku: str, fencing_token: list[str] | None):
    """Begins a transaction that admits the request's token for this SKU, and yields its session.

    The transaction commits at the end of the block. Any error rolls it back. In that case, older
    tokens become stale before the client receives the error.
    """
    if not any(fencing_token or []):
        raise Refusal(*TOKEN_REQUIRED, "the header Fencing-Token is missing")
    token = None
    try:
        with Session(engine) as session:
            # Admit the token first, so that later reads in the transaction see earlier holders'
            # writes.
            session.execute(TIMEOUTS)
            admit = text("SELECT tower_fence.admit_header(:field, :sku)")
            # The lines of the field are joined by a comma. Only the database parses the field.
            token = session.scalar(admit, {"field": ", ".join(fencing_token), "sku": sku})
            yield session
            session.flush()
            commit(session)
    except OutcomeUnknown:
        # If this call also fails, its error must not claim that nothing was written.
        with suppress(SQLAlchemyError):
            make_older_tokens_stale(sku, token)
        raise
    except Exception:
        if token is not None:
            make_older_tokens_stale(sku, token)
        raise


def commit(session: Session):
    # Postgres answers the COMMIT of an aborted transaction with a ROLLBACK, which is not an error.
    connection = session.connection().connection.driver_connection
    if connection.info.transaction_status == TransactionStatus.INERROR:
        log.error("the handler has ignored the error of a statement")
        raise Refusal(*TRANSACTION_ABORTED, "a statement has failed, so nothing was written")
    try:
        session.commit()
    except DBAPIError as error:
        sqlstate = sqlstate_of(error)
        # Class 25: the server is read-only, or has ended the transaction before COMMIT.
        if REFUSALS.get(sqlstate) != STORE_UNAVAILABLE or sqlstate.startswith("25"):
            raise
        log.error("the reply to COMMIT was lost: %s", error.orig)
        raise OutcomeUnknown() from error


def make_older_tokens_stale(sku: str, token: int):
    try:
        with engine.begin() as connection:
            connection.execute(TIMEOUTS)
            call = text("SELECT tower_fence.raise(:sku, :token)")
            connection.execute(call, {"sku": sku, "token": token})
    except DBAPIError as error:
        # TF412: the write was committed after all, or the resource has received a newer token.
        if sqlstate_of(error) != "TF412":
            raise


@app.get("/inventory/{sku}")
def read_stock(sku: Sku) -> Stock:
    with Session(engine) as session:
        row = session.get(Inventory, sku)
    if row is None:
        raise HTTPException(404, "no such SKU")
    return Stock(stock=row.stock)


@app.put("/inventory/{sku}")
def write_stock(sku: Sku, body: Stock, fencing_token: FencingToken = None) -> Stock:
    with fenced(sku, fencing_token) as session:
        session.merge(Inventory(sku=sku, stock=body.stock))
    return body
