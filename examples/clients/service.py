"""An inventory service that admits fencing tokens, with FastAPI and SQLAlchemy 2 over psycopg 3.

    uvicorn service:app

DATABASE_URL is the URL of a Postgres database with the fence and the table in
`examples/drivers/inventory.sql`.
"""

import json
import os
from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import BigInteger, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

PROBLEMS = "https://docs.rs/tower-fence/latest/tower_fence/problem/#"
TOKEN_REQUIRED = (428, "token-required", "A fencing token is required")
REFUSALS = {  # by SQLSTATE
    "TF400": (400, "malformed-token", "The fencing token is malformed"),
    "TF403": (403, "wrong-resource", "The fencing token is for another resource"),
    "TF412": (412, "stale-token", "The fencing token is stale"),
    "55P03": (503, "fence-busy", "The resource is busy"),  # after the lock timeout
    "40001": (503, "fence-busy", "The resource is busy"),  # after too many concurrent writes
    "40P01": (503, "fence-busy", "The resource is busy"),  # after a deadlock
}
LOCK_TIMEOUT = text("SET LOCAL lock_timeout = '5s'")

url = make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
engine = create_engine(url)
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


class Refusal(Exception):
    """A refusal of the fence, which the service answers with a problem document."""

    def __init__(self, status, name, title, detail, **members):
        self.status = status
        problem = {"type": PROBLEMS + name, "title": title, "status": status, "detail": detail}
        self.problem = problem | members


@app.exception_handler(Refusal)
def answer_refusal(_request: Request, refusal: Refusal):
    headers = {"Cache-Control": "no-store"}
    if refusal.status == 503:
        headers["Retry-After"] = "1"
    return JSONResponse(refusal.problem, refusal.status, headers, "application/problem+json")


@app.exception_handler(DBAPIError)
def answer_database_error(request: Request, error: DBAPIError):
    """Answers a refusal by the fence. Any other error is logged and answered with 500."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    if sqlstate not in REFUSALS:
        raise error
    diagnostics = error.orig.diag
    members = json.loads(diagnostics.message_detail or "{}") if sqlstate.startswith("TF") else {}
    refusal = Refusal(*REFUSALS[sqlstate], diagnostics.message_primary, **members)
    return answer_refusal(request, refusal)


def fenced(sku: Sku, fencing_token: Annotated[list[str] | None, Header()] = None):
    """Begins a transaction that admits the request's token for this SKU, and yields its session.

    The transaction commits at the end of the handler. Any error rolls it back. In that case, older
    tokens become stale before the client receives the error.
    """
    if not any(fencing_token or []):
        raise Refusal(*TOKEN_REQUIRED, "the header Fencing-Token is missing")
    token = None
    try:
        with Session(engine) as session, session.begin():
            # Admitted first, so that later reads in the transaction see earlier holders' writes.
            session.execute(LOCK_TIMEOUT)
            admit = text("SELECT tower_fence.admit_header(:field, :sku)")
            # The lines of the field are joined by a comma. Only the database parses the field.
            token = session.scalar(admit, {"field": ", ".join(fencing_token), "sku": sku})
            yield session
    except Exception:
        if token is not None:
            make_older_tokens_stale(sku, token)
        raise


def make_older_tokens_stale(sku: Sku, token: int):
    try:
        with engine.begin() as connection:
            connection.execute(LOCK_TIMEOUT)
            call = text("SELECT tower_fence.raise(:sku, :token)")
            connection.execute(call, {"sku": sku, "token": token})
    except DBAPIError as error:
        # TF412: the write was committed after all, or the resource has seen a newer token.
        if getattr(error.orig, "sqlstate", None) != "TF412":
            raise


# The scope "function" commits before the response is sent. By default FastAPI ends a dependency
# after the response, and the client would receive a success although COMMIT fails.
Fenced = Annotated[Session, Depends(fenced, scope="function")]


@app.get("/inventory/{sku}")
def read_stock(sku: Sku) -> Stock:
    with Session(engine) as session:
        row = session.get(Inventory, sku)
    if row is None:
        raise HTTPException(404, "no such SKU")
    return Stock(stock=row.stock)


@app.put("/inventory/{sku}")
def write_stock(sku: Sku, body: Stock, session: Fenced) -> Stock:
    session.merge(Inventory(sku=sku, stock=body.stock))
    return body
